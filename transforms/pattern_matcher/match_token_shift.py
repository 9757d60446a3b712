"""Recognise the token before each, written as a zero in front of the text without its last token,
and those further before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, call, is_op, nodes_of, replace_with
from onboard.graph.pattern_matcher.patterns import aten
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

_EXACT = 1 << 24
_PADS = (aten.pad, aten.constant_pad_nd)
_ZEROS = (aten.new_zeros, aten.zeros, aten.zeros_like)
_OF_ZERO = (
    aten.to,
    aten._to_copy,
    aten.view,
    aten.reshape,
    aten.expand,
    aten.unsqueeze,
    aten.mul,
    aten.linear,
)
"""What makes zeros of zeros, whatever the other arguments are, except a linear's bias."""


@dataclass(frozen=True)
class _Shifted:
    """A text [batch, sequence, ...] moved by some tokens, behind rows that are all one number."""

    source: fx.Node
    tokens: int
    fill: float = 0.0


@register_transform("match_token_shift")
class MatchTokenShift(GraphTransform[TransformConfig]):
    """Replace cat([zeros [batch, n, channels], x[:, :-n]], dim=1), and x padded so, by `torch_token_shift`.

    Token ids [batch, sequence] may have another number than zero in front. Where both parts went
    through one linear with a bias, the linear of the shifted input is what they are together.
    """

    keeps_shapes = False

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Replace each such expression."""
        matches = 0
        for node in nodes_of(gm, aten.cat, *_PADS, aten.slice):
            if (new := _shift(gm, node)) is not None:
                replace_with(node, new)
                matches += 1
        return matches


def _shift(gm: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Return what a node is in terms of the token shift; None for others."""
    found = _joined(node) or _padded(node) or _padded_and_cut(node)
    if found is not None and node.meta["val"].dim() == 3 and found.fill == 0:
        return _times(gm, node, found.source, found.tokens)
    if found is not None and node.meta["val"].dim() == 2:
        return _of_ids(gm, node, found)
    return _of_layers(gm, node)


def _times(gm: fx.GraphModule, node: fx.Node, x: fx.Node, tokens: int) -> fx.Node:
    for _ in range(tokens):
        x = call(gm, node, torch.ops.onboard.torch_token_shift.default, x, like=node)
    return x


def _of_ids(gm: fx.GraphModule, node: fx.Node, found: _Shifted) -> fx.Node | None:
    """Return shifted token ids, which float32 has exactly: they are less than 2 ** 24."""
    dtype = node.meta["val"].dtype
    if dtype.is_floating_point or dtype == torch.bool or abs(found.fill) >= _EXACT:
        return None
    rows = call(gm, node, aten.unsqueeze.default, found.source, -1, like=node)
    rows = call(gm, node, aten.sub.Scalar, rows, int(found.fill), like=node)
    wide = call(gm, node, aten._to_copy.default, rows, like=node, dtype=torch.float32)
    moved = _times(gm, node, wide, found.tokens)
    rows = call(gm, node, aten._to_copy.default, moved, like=node, dtype=dtype)
    rows = call(gm, node, aten.add.Scalar, rows, int(found.fill), like=node)
    return call(gm, node, aten.squeeze.dim, rows, -1, like=node)


def _joined(node: fx.Node) -> _Shifted | None:
    """Read rows of one number in front of a text without as many of its last tokens."""
    if (parts := _parts(node)) is None:
        return None
    fill, cut = _constant(parts[0]), _cut(parts[1])
    rows = parts[0].meta["val"].shape[1]
    return _Shifted(cut[0], rows, fill) if fill is not None and cut and cut[1] == rows else None


def _parts(node: fx.Node) -> list[fx.Node] | None:
    """Return the two parts that are joined along a text's tokens."""
    if not is_op(node, aten.cat):
        return None
    found = arguments(node)
    along = found["dim"] in (1, 1 - node.meta["val"].dim())
    return found["tensors"] if along and len(found["tensors"]) == 2 else None


def _padded(node: fx.Node) -> _Shifted | None:
    """Read padding in front of a text that lacks as many of its last tokens, or takes them away."""
    if not is_op(node, *_PADS) or (ends := _ends(node)) is None:
        return None
    source, fill = node.args[0], arguments(node)["value"] or 0.0
    if ends[0] > 0 and ends[1] == -ends[0]:
        return _Shifted(source, ends[0], fill)  # type: ignore[arg-type]
    cut = _cut(source)
    return _Shifted(cut[0], ends[0], fill) if ends[1] == 0 and cut and cut[1] == ends[0] else None


def _padded_and_cut(node: fx.Node) -> _Shifted | None:
    """Read a text that is padded in front and loses as many of its last tokens then."""
    cut = _cut(node)
    if cut is None or not is_op(cut[0], *_PADS) or _ends(cut[0]) != (cut[1], 0):
        return None
    source, fill = cut[0].args[0], arguments(cut[0])["value"] or 0.0
    return _Shifted(source, cut[1], fill)  # type: ignore[arg-type]


def _ends(node: fx.Node) -> tuple[int, int] | None:
    """Return how many rows are put in front of a text's tokens and behind them, and nowhere else."""
    found = arguments(node)
    if found.get("mode", "constant") != "constant":
        return None
    pads, place = list(found["pad"]), 2 * (node.meta["val"].dim() - 2)
    before, behind = (pads + [0] * (place + 2))[place : place + 2]
    rest = pads[:place] + pads[place + 2 :]
    return (before, behind) if before > 0 and not any(rest) else None


def _cut(node: Any) -> tuple[fx.Node, int] | None:
    """Return a text, and how many of its last tokens a slice takes away."""
    if not is_op(node, aten.slice):
        return None
    found = arguments(node)
    end = found["end"]
    plain = (found["dim"], found["start"] or 0, found["step"]) == (1, 0, 1)
    return (node.args[0], -end) if plain and isinstance(end, int) and end < 0 else None


def _of_layers(gm: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Return the linear of a shifted input where both of two joined parts went through it."""
    parts, cut = _parts(node), None
    cut = _cut(parts[1]) if parts is not None else None
    if parts is None or cut is None or cut[1] != 1 or parts[0].meta["val"].shape[1] != 1:
        return None
    first, source = parts[0], cut[0]
    if not (is_op(first, aten.linear) and is_op(source, aten.linear)):
        return None
    if not _is_zero(first.args[0]) or not _same_layer(first, source):
        return None
    before = source.args[0]
    assert isinstance(before, fx.Node)
    shifted = call(gm, node, torch.ops.onboard.torch_token_shift.default, before, like=before)
    return call(gm, node, aten.linear.default, shifted, *source.args[1:], like=node)


def _same_layer(first: fx.Node, second: fx.Node) -> bool:
    """Whether two linears read the same weight and bias."""
    ours, theirs = arguments(first), arguments(second)
    pairs = [(ours[key], theirs[key]) for key in ("weight", "bias")]
    return all(a is b or (a.op == b.op == "get_attr" and a.target == b.target) for a, b in pairs)


def _constant(node: Any) -> float | None:
    """Return the number that a tensor is made of; None for others."""
    if is_op(node, aten.full, aten.full_like, aten.new_full):
        value = arguments(node)["fill_value"]
        return value if isinstance(value, int | float) else None
    return 0.0 if _is_zero(node) else None


def _is_zero(node: Any) -> bool:
    if is_op(node, *_ZEROS):
        return True
    if is_op(node, aten.linear) and arguments(node)["bias"] is not None:
        return False
    return is_op(node, *_OF_ZERO) and _is_zero(node.args[0])
