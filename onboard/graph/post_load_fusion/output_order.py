"""Linear layers whose outputs are shuffled before they are used: the weight's rows are shuffled
once instead.

Models that lay out several projections head by head in one matrix take them apart again in every
step, by splits, reshapes and concatenations that copy. What such a chain does is found by running
it on numbered channels.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from onboard.graph.fx import arguments, is_op, nodes_of, replace_with
from onboard.graph.new_nodes import insert_call
from onboard.graph.weight_load.gemm_fusion import LINEARS, private_parameters
from onboard.graph.weight_load.parameters import set_parameter

aten = torch.ops.aten
_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_MOVES = (
    *_RESHAPES,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.narrow.default,
    aten.slice.Tensor,
    aten.cat.default,
    aten.clone.default,
    aten.contiguous.default,
    operator.getitem,
)
_TOKENS = 3


@dataclass(frozen=True)
class _Shuffle:
    """What becomes of a linear's outputs: the nodes that move them, and those of these that
    something else reads.
    """

    linear: fx.Node
    moves: list[fx.Node]
    ends: list[fx.Node]


def order_outputs(gm: fx.GraphModule) -> int:
    """Bring the rows of linear weights into the order in which their outputs are used; return how
    many were.
    """
    private = private_parameters(gm)
    return sum(_order(gm, linear, private) for linear in nodes_of(gm, *LINEARS))


def _order(gm: fx.GraphModule, linear: fx.Node, private: set[str]) -> bool:
    shuffle = _shuffle(linear)
    names = [
        str(arguments(linear)[name].target)
        for name in ("weight", "bias")
        if arguments(linear)[name] is not None
    ]
    if (
        shuffle is None
        or not set(names) <= private
        or any(gm.get_parameter(name).is_meta for name in names)
    ):
        return False
    channels = _channels(shuffle)
    if channels is None or all(_is_range(each) for each in channels.values()):
        return False
    if not all(_can_end(end, linear, len(channels[end])) for end in shuffle.ends):
        return False
    used = torch.cat(list(channels.values()))
    size = gm.get_parameter(names[0]).shape[0]
    unused = torch.ones(size, dtype=torch.bool).index_fill(0, used, False).nonzero().flatten()
    if len(used) + len(unused) != size:  # a channel is used twice
        return False
    order = torch.cat([used, unused])
    for name in names:
        values = gm.get_parameter(name).detach()
        # A new parameter: this one no longer has the values that the weight plan says.
        set_parameter(gm, name, nn.Parameter(values[order.to(values.device)], requires_grad=False))
    start = 0
    for end in shuffle.ends:
        _cut(gm, linear, end, start, len(channels[end]))
        start += len(channels[end])
    return True


def _shuffle(linear: fx.Node) -> _Shuffle | None:
    """Follow a linear's outputs through everything that only moves them; None when all of it is
    used as it is.
    """
    moved, moves = {linear}, []
    pending = sorted(linear.users)
    while pending:
        node = pending.pop(0)
        if node not in moved and is_op(node, *_MOVES) and _tensors(node) <= moved:
            moved.add(node)
            moves.append(node)
            pending.extend(sorted(node.users))
    ends = [node for node in moved if any(user not in moved for user in node.users)]
    if (
        linear in ends
        or not ends
        or any(not isinstance(node.meta.get("val"), Tensor) for node in ends)
    ):
        return None
    return _Shuffle(linear, sorted(moves), sorted(ends))


def _tensors(node: fx.Node) -> set[fx.Node]:
    """Return the inputs of a node that are no sizes."""
    return {
        source
        for source in node.all_input_nodes
        if not isinstance(source.meta.get("val"), int | torch.SymInt)
    }


def _channels(shuffle: _Shuffle) -> dict[fx.Node, Tensor] | None:
    """Return which of the linear's channels each end has for a token, in its order; None when
    tokens mix.
    """
    size = int(shuffle.linear.meta["val"].shape[-1])
    lead = shuffle.linear.meta["val"].ndim - 2
    numbered = torch.arange(_TOKENS * size).view(*[1] * lead, _TOKENS, size)
    try:
        values = _run(shuffle, numbered)
    except (RuntimeError, KeyError, TypeError, ValueError):  # a size that is not that of the tokens
        return None
    found = {}
    for end in shuffle.ends:
        rows = values[end].reshape(_TOKENS, -1)
        if not torch.equal(rows, rows[:1] + torch.arange(_TOKENS)[:, None] * size):
            return None
        found[end] = rows[0]
    return found


def _run(shuffle: _Shuffle, numbered: Tensor) -> Mapping[fx.Node, Any]:
    """Run the moves on numbered channels; sizes are computed from a row of as many tokens."""
    values: dict[fx.Node, Any] = {shuffle.linear: numbered}

    def value(node: fx.Node) -> Any:
        if node not in values:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value)
            if node.op == "placeholder":
                values[node] = torch.empty(1, _TOKENS, device="meta")
            else:
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return values[node]

    for node in shuffle.moves:
        value(node)
    return values


def _is_range(channels: Tensor) -> bool:
    return torch.equal(channels, torch.arange(len(channels)) + channels[:1])


def _can_end(end: fx.Node, linear: fx.Node, size: int) -> bool:
    """Whether an end is a slice of the linear's outputs, or such a slice in another shape."""
    return is_op(end, *_RESHAPES) or _is_slice(end, linear, size)


def _is_slice(end: fx.Node, linear: fx.Node, size: int) -> bool:
    value, whole = end.meta["val"], linear.meta["val"]
    return bool(value.ndim == whole.ndim and value.shape[-1] == size)


def _cut(gm: fx.GraphModule, linear: fx.Node, end: fx.Node, start: int, size: int) -> None:
    piece = insert_call(gm, end, aten.narrow.default, linear, -1, start, size, like=end)
    if not _is_slice(end, linear, size):
        piece = insert_call(gm, end, aten.reshape.default, piece, end.args[1], like=end)
    replace_with(end, piece)
