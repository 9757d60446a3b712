"""Remove transposes that undo each other."""

from __future__ import annotations

from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import nodes_of, replace_with
from onboard.graph.pattern_matcher.patterns import (
    Op,
    Through,
    Var,
    aten,
    find,
    is_node,
    rank,
    same_shape,
)
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)

_INNER = Op(aten.transpose, Var("tensor", where=is_node), Var("dim0"), Var("dim1"))
_PATTERN = Op(
    aten.transpose, Through((aten.contiguous, aten.clone), _INNER), Var("outer0"), Var("outer1")
)


@register_transform("eliminate_redundant_transposes")
class EliminateRedundantTransposes(GraphTransform[TransformConfig]):
    """Replace a transpose of a transpose of the same two dimensions by the tensor itself."""

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> TransformInfo:
        """Remove every such pair, inner ones first, and reshapes to the same shape, which hide
        some.
        """
        for node in nodes_of(gm, aten.reshape, aten.view):
            if same_shape(node.args[0], node):  # type: ignore[arg-type]
                replace_with(node, node.args[0])  # type: ignore[arg-type]
        matches = 0
        for node in nodes_of(gm, aten.transpose):
            found = find(_PATTERN, node)
            if found is not None and _cancels(node, found["dim0"], found["dim1"]):
                replace_with(node, found["tensor"])
                matches += 1
        return TransformInfo(num_matches=matches, is_clean=False, has_valid_shapes=True)


def _cancels(node: fx.Node, dim0: int, dim1: int) -> bool:
    dims = rank(node)
    outer = {dim % dims for dim in node.args[1:3]}  # type: ignore[operator]
    return outer == {dim0 % dims, dim1 % dims}
