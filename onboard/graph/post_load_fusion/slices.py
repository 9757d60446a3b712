"""What a node takes from the last dimension of a tensor, however that is written."""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch import fx

from onboard.graph.fx import arguments, is_op

aten = torch.ops.aten


class Slice(NamedTuple):
    """`whole[..., start:stop]`."""

    whole: fx.Node
    start: int
    stop: int


def slice_of(node: object) -> Slice | None:
    """Return what a node takes from the last dimension of a tensor, None for any other node."""
    if not isinstance(node, fx.Node):
        return None
    if is_op(node, operator.getitem):
        pieces, index = node.args
        return (
            _piece(pieces, index)
            if isinstance(pieces, fx.Node) and isinstance(index, int)
            else None
        )
    if not is_op(node, aten.narrow.default, aten.slice.Tensor):
        return None
    values = arguments(node)
    whole, start = values["self"], values["start"] or 0
    if not _is_last(whole, values["dim"]) or values.get("step", 1) != 1:
        return None
    stop = start + values["length"] if "length" in values else values["end"]
    return Slice(whole, start, width(whole) if stop is None else min(stop, width(whole)))


def _piece(pieces: fx.Node, index: int) -> Slice | None:
    """Return piece `index` of a chunk or split."""
    if not is_op(pieces, aten.chunk, aten.split, aten.split_with_sizes):
        return None
    values = arguments(pieces)
    whole = values["self"]
    if not _is_last(whole, values["dim"]):
        return None
    sizes = values.get("split_sizes", values.get("split_size"))
    if not isinstance(sizes, list | tuple):
        each = sizes or -(-width(whole) // values["chunks"])
        sizes = [each] * (index + 1)
    start = sum(sizes[:index])
    return Slice(whole, start, min(start + sizes[index], width(whole)))


def _is_last(node: fx.Node, dim: int) -> bool:
    """Whether `dim` is the last one of a tensor whose shape is known."""
    value = node.meta.get("val")
    return value is not None and dim in (-1, value.ndim - 1)


def width(node: fx.Node) -> int:
    """Return the size of a tensor's last dimension."""
    return int(node.meta["val"].shape[-1])
