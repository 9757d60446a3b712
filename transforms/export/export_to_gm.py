"""Export the model to a graph with dynamic batch and sequence sizes."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field
from torch import fx, nn

from onboard.errors import UsageError
from onboard.graph.context import TransformContext
from onboard.graph.export import few_rows
from onboard.graph.export.layer_kinds import Repeated, UnlikeError, find_repeated, unbuilt
from onboard.graph.transform import (
    BaseTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)

_FARTHEST = 1 << 20
"""Tokens of the longest text that a graph may be kept for."""


class ExportToGMConfig(TransformConfig):
    """How the model is captured."""

    clone_state_dict: bool = False
    """Give the graph copies of the model's tensors instead of the tensors themselves."""
    strict: bool = False
    """Use torch.export's strict mode (bytecode analysis) instead of plain tracing."""
    patch_list: list[str] | None = None
    """Export patches to apply; None: all registered ones (there are none: generated models export
    as they are).
    """
    num_moe_experts_for_export: int | None = Field(default=None, ge=1)
    """Export this many experts of each mixture and add the others to the graph afterwards; None:
    two.
    """
    stamp_layers: bool = True
    """Export a few layers of each kind and copy the others; False: export every layer, and every
    expert.
    """
    complete: bool = True
    """False: do not copy them. The graph is that of a shorter model, and `context.left_out` says
    what is missing.
    """


@register_transform("export_to_gm")
class ExportToGM(BaseTransform[ExportToGMConfig]):
    """Replace the module by its graph: (input_ids, position_ids) -> logits [batch, sequence,
    vocabulary].
    """

    config_class = ExportToGMConfig
    needed = True

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Export; raises `UsageError` for a patch that does not exist."""
        if self.config.patch_list:
            raise UsageError(
                f"there is no export patch {self.config.patch_list[0]!r}",
                hint="There are none: use null",
            )
        if context.factory.replaces_attention:
            from onboard.graph.export.hf_export import with_canonical_attention

            graph = with_canonical_attention(gm, lambda: self._export(gm, context, None), context)
        else:
            graph = self._stamped(gm, context)
            _check_sizes(graph, type(gm).__name__, context)
        return graph, TransformInfo(num_matches=1, is_clean=False, has_valid_shapes=True)

    def _stamped(self, gm: nn.Module, context: TransformContext) -> nn.Module:
        """Export a part and copy the rest of it; all of it where that cannot be."""
        from onboard.graph.export.stamp import StampError  # imports a computer algebra system

        stamp = self.config.stamp_layers
        few = self.config.num_moe_experts_for_export or 2
        repeated = find_repeated(gm, few) if stamp else None
        try:
            if stamp and not self.config.complete:
                return self._counted(gm, context, repeated or Repeated(None), few)
            return self._export(gm, context, repeated)
        except StampError as error:
            context.facts.append(f"every layer and expert was exported by itself: {error}")
            return self._export(gm, context, None)

    def _counted(
        self, gm: nn.Module, context: TransformContext, repeated: Repeated, few: int
    ) -> nn.Module:
        """Export a part, and of stacked experts a few where they allow it."""
        stacks = few_rows.find_stacks(gm, few)
        for context.left_out in (replace(repeated, stacks=stacks), repeated):
            try:
                with few_rows.few_rows(gm, context.left_out.stacks):
                    return self._export(gm, context, context.left_out)
            except UnlikeError:
                if not context.left_out.stacks:
                    raise
        raise AssertionError("one of the two is exported or raises")

    def _export(
        self, gm: nn.Module, context: TransformContext, repeated: Repeated | None
    ) -> nn.Module:
        from onboard.graph.export.to_graph import export_to_graph

        if (repeated is None or self.config.complete) and (few := sorted(unbuilt(gm))):
            raise UnlikeError(
                f"{few[0]} was built with a few of its entries and would have to be exported in full"
            )
        return export_to_graph(
            gm,
            context.factory.example_inputs(),
            context.factory.dynamic_shapes(),
            context.device,
            strict=self.config.strict,
            clone_state_dict=self.config.clone_state_dict,
            repeated=repeated,
            complete=self.config.complete,
        )


def _check_sizes(graph: nn.Module, name: str, context: TransformContext) -> None:
    """Refuse a graph that is not right for some length of a text, or some batch: nothing looks at
    that later.

    A length that nobody asked for is lowered to what it is right for.

    The last token of the longest text is never an input.
    """
    # Imports a computer algebra system
    from onboard.graph.export.guards import (
        broken_guard,
        fit_or_refuse,
    )

    assert isinstance(graph, fx.GraphModule)
    if broken_guard(graph, max(_FARTHEST, context.runtime.max_seq_len) - 1) is None:
        context.longest = _FARTHEST
    else:
        fit_or_refuse(graph, name, context, "max_seq_len", unread=1)
