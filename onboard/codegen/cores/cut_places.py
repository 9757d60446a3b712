"""Where to cut attention out: operands and results that need the fewest moves to lie as the canonical
op has them, keys and values before they are repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import fx

from onboard.codegen.cores.candidates import Candidate, is_move, sources
from onboard.codegen.cores.core_runs import Cut, CutAxes, Dims, NotAttentionError
from onboard.codegen.cores.head_axes import Axes, Kind, kinds_of, readings

Values = list[dict[fx.Node, Any]]
_LYING = {"bsnd": ("B", "T", "", ""), "bnsd": ("B", "", "T", "")}


def cuts(
    candidate: Candidate, content: set[fx.Node], values: Values, dims: Sequence[Dims]
) -> Iterator[tuple[Cut, str]]:
    """Yield where to cut, and the layout that needs the fewest moves, the best place first.

    Raises `NotAttentionError` where no tensor there has axes of batch and positions.
    """
    operands = [
        _usable(sources(each, content, values[0]), values, dims)
        for each in (candidate.query, candidate.key, candidate.value)
    ]
    results = _usable(_followers(candidate.result, content), values, dims)
    for usable, name in zip(
        (*operands, results), ("queries", "keys", "values", "result"), strict=True
    ):
        if not usable:
            raise NotAttentionError(f"its {name} have no axes of batch and positions")
    usable_at = [*operands, results]
    places = [(nodes, layout) for layout in _LYING for nodes in product(*operands, results)]
    for nodes, layout in sorted(places, key=lambda place: _cost(place, usable_at, values)):
        cut = Cut(*nodes)
        if len({*cut.operands}) == 3 and next(axes_of(cut, values, dims), None) is not None:
            yield cut, layout


def _cost(
    place: tuple[tuple[fx.Node, ...], str],
    usable: list[dict[fx.Node, tuple[Kind, ...]]],
    values: Values,
) -> tuple[int, int, int]:
    """Return what to have little of: numbers in operands, moves, and steps of the code left out."""
    nodes, layout = place
    numbers = sum(values[0][node].numel() for node in nodes[:3])
    moves = sum(_moves(kinds[node], layout) for node, kinds in zip(nodes, usable, strict=True))
    depth = sum([*kinds].index(node) for node, kinds in zip(nodes[:3], usable, strict=False))
    return numbers, moves, -depth


def _moves(kinds: Sequence[Kind], layout: str) -> int:
    """Return about how many moves bring a tensor to a layout."""
    letters = [letter for letter, _ in kinds]
    merged = sum(times > 1 for letter, times in kinds if letter)
    if merged or len(kinds) > 4:
        return 2 + merged
    return int(tuple(letters) != _LYING[layout])


def _usable(
    nodes: Sequence[fx.Node], values: Values, dims: Sequence[Dims]
) -> dict[fx.Node, tuple[Kind, ...]]:
    found = {}
    for node in nodes:
        if all(isinstance(each[node], torch.Tensor) for each in values):
            kinds = kinds_of([each[node].shape for each in values], dims)
            if kinds is not None and next(readings(kinds), None) is not None:
                found[node] = kinds
    return found


def _followers(node: fx.Node, content: set[fx.Node]) -> list[fx.Node]:
    """Return a node and the moves behind it that nothing else reads before."""
    found = [node]
    while True:
        users = [user for user in found[-1].users if user in content]
        if len(users) != 1 or not is_move(users[0]) or users[0].args[0] is not found[-1]:
            return found
        found.append(users[0])


def axes_of(cut: Cut, values: Values, dims: Sequence[Dims]) -> Iterator[CutAxes]:
    """Yield what the axes at a cut may be, the usual ones first."""
    query, key, value, result = (
        list(readings(kinds_of([each[node].shape for each in values], dims) or ()))
        for node in (*cut.operands, cut.result)
    )
    for of_key, of_value, of_query, of_result in product(key, value, query, result):
        heads = of_key.heads
        if of_key.channels != of_query.channels or of_value.channels != of_result.channels:
            continue
        if of_value.heads != heads or of_query.heads != of_result.heads or of_query.heads % heads:
            continue
        if any(each.key_heads not in (None, heads) for each in (of_query, of_result)):
            continue
        if "K" in of_key.letters() or "K" in of_value.letters():
            continue
        grouped = 1 < heads < of_query.heads
        for interleaved in (False, True) if grouped else (False,):
            yield CutAxes(
                _split(of_query, heads, interleaved),
                _alone(of_key),
                _alone(of_value),
                _split(of_result, heads, interleaved),
            )


def _split(axes: Axes, key_heads: int, interleaved: bool) -> Axes:
    return axes.split(key_heads, interleaved=interleaved)


def _alone(axes: Axes) -> Axes:
    """Return the axes of keys or values, whose heads are key heads each of its own."""
    roles = tuple(tuple("K" if each == "H" else each for each in role) for role in axes.roles)
    return Axes(roles, axes.heads, axes.channels, axes.heads)
