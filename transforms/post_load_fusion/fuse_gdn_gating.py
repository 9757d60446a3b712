"""The gates of a gated delta rule, its decay and its rate of correction, in one op."""

from __future__ import annotations

import operator
from itertools import takewhile
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.backends import choose_backend, fused_op
from onboard.graph.context import TransformContext
from onboard.graph.fx import Target, arguments, is_op, nodes_of, replace_with
from onboard.graph.new_nodes import insert_call
from onboard.graph.pattern_matcher.patterns import (
    Op,
    Var,
    aten,
    dtype,
    find,
    is_node,
    is_number,
    rank,
    same_shape,
)
from onboard.graph.post_load_fusion.dtype_casts import is_cast
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform


def _is_of_heads(value: Any) -> TypeGuard[fx.Node]:
    """Whether an argument has one number for each head."""
    return is_node(value) and "val" in value.meta and rank(value) == 1


_SUM = Op(
    aten.add,
    Var("a", where=is_node),
    Var("bias", where=_is_of_heads),
    commutes=True,
    alpha=1,
    bind="sum",
)
_DECAY = Op(
    aten.mul, Var("rate", where=_is_of_heads), Op(aten.softplus, _SUM, 1, 20), commutes=True
)


class _Gates(NamedTuple):
    """The nodes of both gates, and what they are computed from."""

    decay: fx.Node
    correction: fx.Node
    a: fx.Node
    b: fx.Node
    rate: fx.Node
    bias: fx.Node


@register_transform("fuse_gdn_gating")
class FuseGdnGating(GraphTransform[TransformConfig]):
    """Replace `-exp(A_log) * softplus(a + dt_bias)` and `sigmoid(b)` of each gated delta rule by
    one op.

    The factor -exp(A_log) is a parameter by then (`fold_constants`). Gates of another form are a
    visible fact.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each delta rule."""
        rules = nodes_of(gm, torch.ops.onboard.torch_gated_delta_rule)
        op = fused_op(choose_backend("auto", context, self.key), "fused_gdn_gating")
        left = [rule for rule in rules if not _fuse(gm, rule, op)]
        if left:
            context.facts.append(
                f"{self.key}: gates of {len(left)} delta rules have another form, as of {left[0]}"
            )
        return len(rules) - len(left)


def _fuse(gm: fx.GraphModule, rule: fx.Node, op: Target) -> bool:
    """Put the op in the place of a delta rule's gates; return whether it fits there."""
    gates = _gates(rule)
    if gates is None:
        return False
    place = min({*gates.decay.users, *gates.correction.users})
    before = set(takewhile(lambda node: node is not place, gm.graph.nodes))
    late = [node for node in gates[2:] if node not in before]
    if any(node.op != "get_attr" for node in late):
        return False
    for weight in late:
        place.prepend(weight)
    pair = insert_call(gm, place, op, *gates[2:], like=gates.decay)
    for index, gate in enumerate(gates[:2]):
        replace_with(gate, insert_call(gm, place, operator.getitem, pair, index, like=gate))
    return True


def _gates(rule: fx.Node) -> _Gates | None:
    """Return the gates of a delta rule where they have the form and dtypes of the op."""
    values = arguments(rule)
    decay, correction = values["g"], _sigmoid(values["beta"])
    found = find(_DECAY, decay)
    if (
        found is None
        or correction is None
        or dtype(found["sum"]) != torch.float32
        or dtype(decay) != torch.float32
    ):
        return None
    a, b = found["a"], correction.args[0]
    a = a.all_input_nodes[0] if is_cast(a) else a
    assert isinstance(b, fx.Node)
    sizes = {node.meta["val"].shape[-1] for node in (a, found["rate"], found["bias"])}
    if len(sizes) > 1 or not (same_shape(a, decay) and same_shape(a, b)):
        return None
    return _Gates(decay, correction, a, b, found["rate"], found["bias"])


def _sigmoid(correction: fx.Node) -> fx.Node | None:
    """Return the sigmoid that a rate of correction is, or is a multiple of, which is then taken
    where it is read.
    """
    if is_op(correction, aten.mul) and is_number(correction.args[1]):
        min(correction.users).prepend(correction)
        (correction,) = correction.all_input_nodes
    return correction if is_op(correction, aten.sigmoid) else None
