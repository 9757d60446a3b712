"""Mark the sums that end chosen layers, whose hidden states are to be kept (for a draft model, as
EAGLE-3 reads them).

Li et al. 2025, arXiv:2503.01840: the draft reads hidden states from the beginning, the middle and
the end of the model.
"""

from __future__ import annotations

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.errors import OnboardError, UsageError
from onboard.graph.context import TransformContext
from onboard.graph.fx import is_op
from onboard.graph.pattern_matcher.layer_ends import layer_paths, results
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
    skipped,
)

_LEAST_LAYERS = 7


class DetectHiddenStatesForCaptureConfig(TransformConfig):
    """Which layers."""

    capture_hidden_states: bool = True
    eagle3_layers_to_capture: list[int] | None = None
    """Indices of layers, each of which is kept as the layer after it gets it; None: for a model of
    n > 6 layers 1, n // 2 - 1 and n - 4."""


@register_transform("detect_hidden_states_for_capture")
class DetectHiddenStatesForCapture(GraphTransform[DetectHiddenStatesForCaptureConfig]):
    """The last addition of each chosen layer becomes a `torch_residual_add`, which
    `insert_cached_residual_add` finds.

    No fusion takes such a sum into another operator.
    """

    config_class = DetectHiddenStatesForCaptureConfig

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int | TransformInfo:
        """Count one match for each layer."""
        if not self.config.capture_hidden_states:
            return skipped("no layer is to be captured")
        layers = layer_paths(gm)
        chosen = self._chosen(len(layers))
        for index in chosen:
            _last_sum(gm, layers[index]).target = torch.ops.onboard.torch_residual_add.default
        gm.recompile()
        kept = f"hidden states behind {', '.join(layers[index] for index in chosen)}"
        return TransformInfo(
            num_matches=len(chosen), is_clean=True, has_valid_shapes=True, summary=kept
        )

    def _chosen(self, count: int) -> list[int]:
        """Return the layers to capture, in order, of a model that has `count`."""
        wanted = self.config.eagle3_layers_to_capture
        if wanted is None:
            if count < _LEAST_LAYERS:
                raise UsageError(
                    f"{self.key}: the model has {count} layers, and what is captured by default needs {_LEAST_LAYERS}",
                    hint="Name layers with eagle3_layers_to_capture",
                )
            wanted = [1, count // 2 - 1, count - 4]
        if wrong := [index for index in wanted if not 0 <= index < count]:
            raise UsageError(
                f"{self.key}: eagle3_layers_to_capture has {wrong[0]}",
                hint=f"The model has layers 0 to {count - 1}",
            )
        return sorted(set(wanted))


def _last_sum(gm: fx.GraphModule, layer: str) -> fx.Node:
    """Return the sum that a layer hands on; raise `OnboardError` where it ends with something
    else.
    """
    found = results(gm, layer)
    sums = [node for node in found if _is_sum(node)]
    if len(sums) != 1:
        last = ", ".join(str(node.target) for node in found)
        raise OnboardError(
            f"{layer} does not end with one residual addition: what is read of it comes from {last or 'nothing'}",
            hint="Hidden states are captured at residual additions: leave this layer out",
        )
    return sums[0]


def _is_sum(node: fx.Node) -> bool:
    """Whether a node adds two tensors, of one shape, as they are."""
    if not is_op(node, torch.ops.aten.add.Tensor) or node.kwargs:
        return False
    terms = [term.meta["val"] for term in node.args if isinstance(term, fx.Node)]
    return len(terms) == 2 and all(term.shape == node.meta["val"].shape for term in terms)
