"""Let a table of one number be read for rows of any length."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, attr_tensor, nodes_of, replace_with
from onboard.graph.new_nodes import insert_call
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

aten = torch.ops.aten


@register_transform("widen_uniform_slice")
class WidenUniformSlice(GraphTransform[TransformConfig]):
    """Replace `table[:, :length]` by `table[:, :1]`, expanded, where all of the table's entries are
    equal there.

    Such a table (types of tokens that nobody gave) is as long as the longest text; a row of several
    texts may be longer. Only tables that no checkpoint holds: their numbers are known, and looked
    at for each graph.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Replace each such slice."""
        kept = gm.state_dict().keys()
        slices = [node for node in nodes_of(gm, aten.slice.Tensor) if _is_uniform(gm, node, kept)]
        for node in slices:
            _widen(gm, node)
        return len(slices)


def _is_uniform(gm: fx.GraphModule, node: fx.Node, kept: Any) -> bool:
    """Whether a slice takes the first `length` entries, a size of the input, of a table in which
    they are equal.
    """
    found = arguments(node)
    table, dim, end = attr_tensor(gm, found["self"]), found["dim"], found["end"]
    if (
        table is None
        or isinstance(table, nn.Parameter)
        or table.is_meta
        or found["self"].target in kept
    ):
        return False
    if not isinstance(end, fx.Node):
        return False
    size, length = node.meta["val"].shape[dim], end.meta["val"]
    whole = (
        isinstance(size, torch.SymInt)
        and isinstance(length, torch.SymInt)
        and size.node.expr == length.node.expr
    )
    return whole and torch.equal(table, table.narrow(dim, 0, 1).expand_as(table))


def _widen(gm: fx.GraphModule, node: fx.Node) -> None:
    found = arguments(node)
    sizes: list[Any] = [-1] * node.meta["val"].dim()
    sizes[found["dim"]] = found["end"]
    first = insert_call(gm, node, aten.slice.Tensor, found["self"], found["dim"], 0, 1, like=node)
    replace_with(node, insert_call(gm, node, aten.expand.default, first, sizes, like=node))
