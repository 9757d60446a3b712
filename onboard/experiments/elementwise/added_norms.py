"""Sums with their norms, taken apart where one of them can be fused with something else."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from onboard.graph.fx import arguments, is_op, nodes_of, replace_with
from onboard.graph.new_nodes import insert_call
from onboard.ops import has_triton

_PAIRS = {
    getattr(torch.ops.onboard, f"{backend}_fused_add_rmsnorm").default: getattr(
        torch.ops.onboard, f"{backend}_rmsnorm"
    ).default
    for backend in (("torch", "triton") if has_triton() else ("torch",))
}


def split_added_norms(gm: fx.GraphModule, joins: Callable[[fx.Node], bool]) -> int:
    """Take `*_fused_add_rmsnorm` apart where `joins` holds for a node beside it; return how often.

    The operators of such a pair come together again, with that node.
    """
    found = [
        node for node in nodes_of(gm, *_PAIRS) if any(joins(beside) for beside in _beside(node))
    ]
    for node in found:
        _split(gm, node)
    return len(found)


def _beside(node: fx.Node) -> list[fx.Node]:
    return [*node.all_input_nodes, *(reader for part in node.users for reader in part.users)]


def _split(gm: fx.GraphModule, node: fx.Node) -> None:
    values = arguments(node)
    total = insert_call(
        gm, node, torch.ops.aten.add.Tensor, values["x"], values["residual"], like=node
    )
    normalised = total
    if values["dtype"] is not None:
        normalised = insert_call(
            gm, node, torch.ops.aten.to.dtype, total, values["dtype"], like=node
        )
    normed = insert_call(
        gm, node, _PAIRS[node.target], normalised, values["weight"], values["eps"], like=node
    )
    for part in list(node.users):
        assert is_op(part, operator.getitem)
        replace_with(part, normed if part.args[1] == 0 else total)
    gm.graph.erase_node(node)
