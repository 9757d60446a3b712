"""A back end's kernels for mixtures of experts with weights in eight bits and scales of rows."""

from __future__ import annotations

import torch
from torch import fx

from onboard.graph.backends import Backend
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, attr_tensor, nodes_of
from onboard.graph.post_load_fusion.mixture_kernels import use_kernels
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)
from onboard.ops.library import forms_of


class FuseFP8MoeConfig(TransformConfig):
    """Which back end to use."""

    backend: Backend = "auto"
    allow_different_input_scales: bool = False
    """Experts whose checkpoint has different scales for their inputs share the largest; without,
    each keeps its own. It says nothing where a token has a scale.
    """


@register_transform("fuse_fp8_moe")
class FuseFP8Moe(GraphTransform[FuseFP8MoeConfig]):
    """Point mixtures that `quantize_fp8_moe_from_config` put in at the back end's op; their weights
    are stacked already.
    """

    config_class = FuseFP8MoeConfig

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> TransformInfo:
        """Count one match for each mixture."""
        count = use_kernels(gm, "fp8_moe", self.config.backend, context, self.key)
        if self.config.allow_different_input_scales and (shared := _share_scales(gm)):
            fact = (
                f"{self.key}: experts of {shared} mixtures share the largest of their input scales"
            )
            context.facts.append(fact)
        return TransformInfo(num_matches=count, is_clean=True, has_valid_shapes=True)


@torch.no_grad()
def _share_scales(gm: fx.GraphModule) -> int:
    """Give all experts the largest input scale; return how many mixtures had different ones."""
    ops = [getattr(torch.ops.onboard, name) for name in forms_of("torch_fp8_moe").values()]
    return sum(any([_share(gm, node, name) for name in _SCALES]) for node in nodes_of(gm, *ops))


_SCALES = ("w3_w1_input_scale", "w2_input_scale")


def _share(gm: fx.GraphModule, node: fx.Node, name: str) -> bool:
    scales = attr_tensor(gm, arguments(node)[name])
    if scales is None or bool((scales == scales[0]).all()):
        return False
    scales.fill_(float(scales.max()))
    return True
