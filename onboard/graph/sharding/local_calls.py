"""Calls whose arguments say more than shapes: what they are on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch.fx import Node

from onboard.graph.fx import arguments, call
from onboard.graph.sharding.cuts import Cut, runs
from onboard.graph.sharding.signatures import aten, ops
from onboard.graph.sharding.structure import set_argument
from onboard.graph.weight_load.parameters import leave_unread

if TYPE_CHECKING:
    from onboard.graph.sharding.rewriting import Rewriting

EXPERTS = "experts"
"""The letter of a mixture's lists."""
_LISTS = ("w1_weight", "w2_weight", "w3_weight", "w1_bias", "w2_bias", "w3_bias")


Change = Callable[["Rewriting", Node, Mapping[str, Cut]], Node]
_CHANGES: dict[Any, Change] = {}


def _changed_by(op: Any) -> Callable[[Change], Change]:
    """Register what changes the calls of an op."""

    def register(change: Change) -> Change:
        _CHANGES[op] = change
        return change

    return register


def localise(rewriting: Rewriting, node: Node, cuts: Mapping[str, Cut]) -> Node:
    """Change what a call of a cut op says, where shapes alone do not; return the node that has its
    result.
    """
    change = _CHANGES.get(getattr(node.target, "overloadpacket", None))
    return node if change is None else change(rewriting, node, cuts)


@_changed_by(ops.torch_moe)
def _mixture(rewriting: Rewriting, node: Node, cuts: Mapping[str, Cut]) -> Node:
    """Keep the rank's experts, and number them from zero: ids of others are outside and add
    nothing.
    """
    if EXPERTS not in cuts:
        return node
    [(start, stop)] = runs(cuts[EXPERTS].entries[rewriting.rank])
    for name in _LISTS:
        weights = arguments(node)[name] or []
        others = [*weights[:start], *weights[stop:]]
        leave_unread(rewriting.gm, (str(each.target) for each in others))
        if weights:
            set_argument(node, name, list(weights[start:stop]))
    chosen = arguments(node)["selected_experts"]
    if start:
        local = call(rewriting.gm, node, aten.sub.Tensor, chosen, start, like=node)
        set_argument(node, "selected_experts", local)
    return node


@_changed_by(aten.embedding)
def _embedding(rewriting: Rewriting, node: Node, cuts: Mapping[str, Cut]) -> Node:
    """Look up the rank's tokens, and give zeros for those of others."""
    [(start, _)] = runs(cuts["v"].entries[rewriting.rank])
    given = arguments(node)
    node.target = ops.embedding_of_rank.default
    node.args, node.kwargs = (given["indices"], given["weight"], start), {}
    return node


@_changed_by(ops.torch_causal_conv1d)
def _convolution(rewriting: Rewriting, node: Node, cuts: Mapping[str, Cut]) -> Node:
    """Each channel is a group of its own, and their number is that of the weight."""
    if arguments(node)["groups"] is not None:
        set_argument(node, "groups", None)
    return node
