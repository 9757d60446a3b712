"""Which of transformers' results a module's own stand for, where transformers returns more of
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


def counterparts(actual: Sequence[Any], expected: Sequence[Any]) -> list[Any]:
    """Return which of `expected` each of `actual` stands for, in order.

    One that is left out (attention's weights, before what an indexer chose) has another shape than
    its follower, or other values (a router's logits, where it chooses all experts). Where their
    kinds tell them apart, the order tells nothing: transformers' versions differ in that of a
    router. Results inside results, as a router's beside a mixture's, or those of a dict, are such
    as the others. None stands for what a dict has left out.
    """
    if not any(isinstance(item, tuple | dict) for item in actual):
        expected = list(_flat(expected))
    expected = [*expected, *[None] * (_nones(actual) - _nones(expected))]
    ours, theirs = ([_kind(item) for item in items] for items in (actual, expected))
    if len(set(ours)) == len(ours) and all(theirs.count(kind) == 1 for kind in ours):
        return [expected[theirs.index(kind)] for kind in ours]
    found: list[Any] = []
    rest = list(expected)
    for index, item in enumerate(actual):
        spare = len(rest) - (len(actual) - index)
        shapes = [_shape(other) for other in rest[: spare + 1]]
        same = [place for place, shape in enumerate(shapes) if shape == _shape(item)]
        skipped = (
            min(same, key=lambda place: distance(item, rest[place]))
            if len(same) > 1
            else [*same, 0][0]
        )
        found.append(rest[skipped])
        rest = rest[skipped + 1 :]
    return found


def _nones(items: Sequence[Any]) -> int:
    return sum(item is None for item in items)


def _flat(items: Sequence[Any]) -> Iterator[Any]:
    for item in items:
        inside = tuple(item.values()) if isinstance(item, dict) else item
        yield from _flat(inside) if isinstance(inside, tuple) else (inside,)


def distance(actual: Any, expected: Any) -> float:
    """Return how far apart the values of two tensors of one shape are, how many keys of a dict another
    one lacks, how much longer one list is; 0.0 for anything else.
    """
    if isinstance(actual, dict) and isinstance(expected, dict):
        return float(len(actual.keys() - expected.keys()))
    if isinstance(actual, list) and isinstance(expected, list):
        return float(abs(len(actual) - len(expected)))
    if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return 0.0
    dtype = torch.complex128 if actual.is_complex() or expected.is_complex() else torch.float64
    difference = actual.to(dtype) - expected.to(actual.device, dtype)
    return float(difference.abs().nan_to_num(torch.inf).sum())


def _kind(item: Any) -> object:
    """Return what tells a tensor from another one: its shape, and whether it has numbers or
    indices.
    """
    is_tensor = isinstance(item, torch.Tensor)
    return (item.shape, item.is_floating_point()) if is_tensor else _shape(item)


def _shape(item: Any) -> object:
    """Return the shape of a tensor, the type of a number, a list, a tuple or a dict, None for anything
    else.
    """
    known = type(item) if isinstance(item, int | float | list | tuple | dict) else None
    return getattr(item, "shape", known)


def is_choice(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether one has the positions of chosen keys, [batch, queries, chosen], and the other a mask
    of them.
    """
    is_mask = expected.dtype == torch.bool and expected.dim() == 4 and expected.shape[1] == 1
    return is_mask and actual.dtype == torch.int64 and actual.dim() == 3


def without_later(ids: torch.Tensor) -> torch.Tensor:
    """Return the positions of chosen keys, [batch, queries, chosen] integers, with -1 for those
    behind their query.

    A query that has fewer keys than are to be chosen gets later ones as well, in no order that
    means anything: attention leaves them out. Anything else is returned as it is.
    """
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 3:
        return ids
    position = torch.arange(ids.shape[1], device=ids.device).unsqueeze(-1)
    return ids.masked_fill(ids > position, -1)


def weights_of(actual: Sequence[Any], expected: Any) -> torch.Tensor | None:
    """Return attention's weights [batch, heads, queries, keys] of scaled queries and keys, both [batch,
    heads, sequence, dim], that a module gives in the place of these weights; None for other results.
    """
    both = [item for item in actual if isinstance(item, torch.Tensor) and item.dim() == 4]
    if len(both) != 2 or len(actual) != 2 or not isinstance(expected, torch.Tensor):
        return None
    query, key = both
    groups = query.shape[1] // max(1, key.shape[1])
    square = expected.shape == (*query.shape[:3], key.shape[2])
    if not square or query.shape[3] != key.shape[3] or groups * key.shape[1] != query.shape[1]:
        return None
    scores = query @ key.repeat_interleave(groups, dim=1).transpose(2, 3)
    seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
