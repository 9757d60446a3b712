"""Linear layers in the form of the op that also does what stands around them."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import fx
from torch._ops import OpOverload

from onboard.graph.backends import NO_TRITON, Backend, choose_backend, fused_op
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, nodes_of, replace_with
from onboard.graph.new_nodes import insert_call
from onboard.graph.transform import GraphTransform, TransformConfig, TransformInfo, skipped
from onboard.ops.library import declared, op_sources

_LEFT_OUT: dict[str, Any] = {"eps": 0.0, "activation": "", "quantize": ""}
"""Arguments of fused linears for what is not there."""


def fused_linears(gm: fx.GraphModule, backend: str) -> list[fx.Node]:
    """Return the calls of a back end's fused linears, in graph order."""
    forms = {source.takes_codes for source in op_sources().values()} - {""} | {"fused_linear"}
    return nodes_of(gm, *(fused_op(backend, form) for form in sorted(forms)))


def fuse_linear(gm: fx.GraphModule, linear: fx.Node, backend: str) -> fx.Node:
    """Put a back end's fused form in the place of a linear; return it."""
    target = fused_op(backend, declared(linear.target).takes_codes or "fused_linear")
    return replace_fused(gm, linear, linear, arguments(linear), target)


def replace_fused(
    gm: fx.GraphModule,
    linear: fx.Node,
    place: fx.Node,
    values: dict[str, Any],
    target: OpOverload | None = None,
) -> fx.Node:
    """Put a fused linear with these arguments in the place of a node, by the op `target` or that of
    the linear, which is erased; return it.
    """
    target = target or linear.target  # type: ignore[assignment]
    assert isinstance(target, OpOverload)
    names = [argument.name for argument in target._schema.arguments]
    args = [values.get(name, _LEFT_OUT.get(name)) for name in names]
    new = insert_call(gm, place, target, *args, like=linear)
    replace_with(place, new)
    if place is not linear:
        gm.graph.erase_node(linear)
    return new


class FuseCodedLinearConfig(TransformConfig):
    """Which back end computes the layers."""

    backend: Backend = "torch"
    """auto: kernels, where the run has them; else layers stay as they are."""


class FuseForeignLinearConfig(FuseCodedLinearConfig):
    """Which back end computes the layers."""

    backend: Backend = "trtllm"
    """auto: kernels, where the run has them; else layers stay as they are. Another library's, which
    is not here, means that, or the reference.
    """


class FuseCodedLinear(GraphTransform[FuseCodedLinearConfig]):
    """Replace linears that take codes of one scheme by a back end's op that also does what stands
    around them; `fuse_linears` then lets it.
    """

    config_class = FuseCodedLinearConfig
    op: ClassVar[str]
    """The reference op of the scheme."""

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int | TransformInfo:
        """Count one match for each linear layer."""
        backend = choose_backend(self.config.backend, context, self.key)
        if backend == "torch" and self.config.backend == "auto":
            return skipped(NO_TRITON)
        linears = [
            node for node in gm.graph.nodes if declared(node.target).function.__name__ == self.op
        ]
        for node in linears:
            fuse_linear(gm, node, backend)
        return len(linears)
