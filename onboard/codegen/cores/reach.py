"""How long texts and how large scores have to be until every number in the code has had its effect."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from onboard.codegen.cores.value_paths import name_of
from onboard.graph.fx import attr_tensor

LONGEST = 4096
"""Of longer texts nothing is computed."""
INFINITE = 1e30
_ENDLESS = 2**31 - 1
_SHAPING = frozenset(
    ("view", "reshape", "flatten", "unflatten", "transpose", "permute", "contiguous", "size")
    + ("expand", "unsqueeze", "squeeze", "swapaxes", "movedim", "softmax", "sum", "split", "chunk")
    + ("unbind", "repeat", "repeat_interleave", "dim", "amax", "cat", "stack")
)
_COMPARING = frozenset(
    ("lt", "le", "gt", "ge", "eq", "ne", "less", "greater", "less_equal", "greater_equal")
    + ("not_equal", "equal")
)
_BOUNDING = frozenset(
    ("clamp", "clip", "clamp_min", "clamp_max", "minimum", "maximum", "max", "min", "hardtanh")
    + ("threshold", "nan_to_num", "sym_max", "sym_min", "relu", "where")
)
OF_POSITIONS = (
    _COMPARING
    | _BOUNDING
    | frozenset(
        (
            "tril",
            "triu",
            "mod",
            "remainder",
            "fmod",
            "floordiv",
            "floor_divide",
            "getitem",
            "arange",
        )
        + ("narrow", "radd", "topk", "bucketize", "cat", "sub", "rsub", "roll", "add")
    )
)


def numbers_of(node: fx.Node) -> list[int | float]:
    """Return the numbers among a node's arguments, those of slices too."""
    leaves = tree_leaves([_open(each) for each in (node.args, node.kwargs)])
    return [each for each in leaves if type(each) in (int, float)]


def _open(value: Any) -> Any:
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if isinstance(value, list | tuple):
        return [_open(each) for each in value]
    return {key: _open(each) for key, each in value.items()} if isinstance(value, dict) else value


Scalars = Callable[[fx.Node], Iterable[tuple[fx.Node, int | float]]]
"""Says which nodes give numbers to a node, the same for all texts, and which."""


def lengths_to_reach(
    gm: fx.GraphModule, nodes: Iterable[fx.Node], of_scores: Container[fx.Node], scalars: Scalars
) -> set[int]:
    """Return the lengths at which constants of `nodes` may change something: those longer than
    `LONGEST` only where they can be about positions, which bounds of scores are not.
    """
    found: set[int] = set()
    for node in nodes:
        if node.op == "get_attr":
            table = attr_tensor(gm, node)
            whole = table is not None and not table.is_floating_point()
            found.update(table.shape if table is not None and (whole or table.dim() > 1) else ())
        elif name_of(node) not in _SHAPING:
            given = [*numbers_of(node), *(value for _, value in scalars(node))]
            found.update(_lengths(node, given, node in of_scores))
    return found


def _lengths(node: fx.Node, given: list[int | float], of_scores: bool) -> set[int]:
    whole = {abs(int(each)) for each in given if abs(each) < _ENDLESS and each % 1 == 0}
    name = name_of(node)
    is_place = name in OF_POSITIONS and not (of_scores and name in _COMPARING | _BOUNDING)
    return {each for each in whole if each <= LONGEST or is_place}


def score_bounds(nodes: Iterable[fx.Node], values: dict[fx.Node, Any]) -> Iterator[float]:
    """Yield how large scores have to be for bounds and comparisons of `nodes` to change them."""
    for node in nodes:
        if name_of(node) in _COMPARING | _BOUNDING:
            given = [values.get(each) for each in node.all_input_nodes]
            known = [each for each in given if type(each) in (int, float) or _is_number(each)]
            for each in (*numbers_of(node), *known):
                if each is not None and abs(each) < INFINITE:
                    yield abs(float(each))


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


class Outcomes:
    """Which comparisons and bounds have come out in both ways in some run."""

    def __init__(self) -> None:
        self._seen: dict[fx.Node, set[bool]] = {}

    def note(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> None:
        """Note the outcome of a node, given the values of its inputs and its own."""
        name = name_of(node)
        if name not in _COMPARING | _BOUNDING or name == "where":
            return
        given = [values[each] for each in node.all_input_nodes]
        numbers = [*numbers_of(node), *(each for each in given if type(each) in (int, float))]
        if numbers and min(abs(each) for each in numbers) >= INFINITE:
            return
        value = values[node]
        if name in _COMPARING:
            self._add(node, value if isinstance(value, torch.Tensor) else torch.tensor(value))
            return
        before = given[0] if given else None
        if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor):
            self._add(node, value != before if value.shape == before.shape else None)

    def _add(self, node: fx.Node, outcome: torch.Tensor | None) -> None:
        if outcome is not None:
            known = {bool(outcome.any()), bool(outcome.all())}
            self._seen.setdefault(node, set()).update(known)

    def undecided(self) -> list[fx.Node]:
        """Return those that have come out in one way alone."""
        return [node for node, seen in self._seen.items() if len(seen) < 2]
