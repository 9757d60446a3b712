"""Mark where key and value heads are repeated for grouped-query attention."""

from __future__ import annotations

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import call, nodes_of, replace_with
from onboard.graph.pattern_matcher.patterns import (
    Bound,
    Either,
    Op,
    Var,
    aten,
    find,
    is_node,
    rank,
    same_dim,
)
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

_HEADS = Var("heads", where=is_node)
_PATTERN = Either(
    Op(
        (aten.reshape, aten.view),
        Op(aten.expand, Op(aten.unsqueeze, _HEADS, Var("dim")), Var("sizes")),
    ),
    Op(
        (aten.reshape, aten.view),
        Op(aten.clone, Op(aten.expand, Op(aten.unsqueeze, _HEADS, Var("dim")), Var("sizes"))),
    ),
    Op(aten.repeat_interleave.self_int, _HEADS, Var("n"), Var("repeat_dim")),
)


@register_transform("match_repeat_kv")
class MatchRepeatKV(GraphTransform[TransformConfig]):
    """Replace unsqueeze, expand, reshape (or repeat_interleave) of [b, kv, s, d] by
    `torch_attention_repeat_kv`.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Replace each such expression."""
        matches = 0
        for node in nodes_of(gm, aten.reshape, aten.view, aten.repeat_interleave):
            found = find(_PATTERN, node)
            if found is None or (repeats := _repeats(node, found)) is None:
                continue
            op = torch.ops.onboard.torch_attention_repeat_kv.default
            replace_with(node, call(gm, node, op, found["heads"], repeats, like=node))
            matches += 1
        return matches


def _repeats(node: fx.Node, found: Bound) -> int | None:
    """Return how often each head is repeated, None when the expression is something else."""
    heads: fx.Node = found["heads"]
    if rank(heads) != 4 or rank(node) != 4:
        return None
    if "n" in found:
        return (
            int(found["n"])
            if isinstance(found["n"], int) and same_dim(found["repeat_dim"], heads, 1)
            else None
        )
    before, after = heads.meta["val"].shape, node.meta["val"].shape
    repeats = found["sizes"][2] if found["dim"] == 2 else None
    if not isinstance(repeats, int) or after[1] != before[1] * repeats or after[-1] != before[-1]:
        return None
    return repeats
