"""Loops over lists of modules, which a recording has unrolled.

Small models have fewer layers than whole ones: calls of a list's modules have to be a loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, cast

from torch import nn

from onboard.codegen.straight.straight_lines import (
    Line,
    Loop,
    NotStraight,
    Own,
    Ref,
    Repeat,
    Straight,
    leaves,
    mapped,
    owned,
)

_INDEX = "index"


@dataclass(frozen=True)
class _Mark:
    """What turns have in common: a result of the turn (`here`), or of that before, by its place; an
    `item` of a list.
    """

    kind: str
    place: Any
    path: tuple[Any, ...]


Path = tuple[str, ...]


def rolled(straight: Straight, module: nn.Module) -> Straight:
    """Return a recording with a loop for each list of modules.

    Raises:
        NotStraight: its modules are not used one like the other.
    """
    while (found := _first_list(straight, module)) is not None:
        straight = _with_loop(straight, found, module)
    return _renumbered(straight)


def _renumbered(straight: Straight) -> Straight:
    """Number the calls, so that recordings of models with more layers have the same numbers."""
    order: dict[int, int] = {}

    def note(lines: Sequence[Any]) -> None:
        for line in lines:
            if isinstance(line, Repeat):
                for ref, _, _ in line.carried:
                    order.setdefault(ref.number, len(order))
                note(line.body)
            else:
                order.setdefault(line.number, len(order))

    def change(leaf: Any) -> Any:
        return replace(leaf, number=order[leaf.number]) if isinstance(leaf, Ref | Line) else leaf

    note(straight.lines)
    return Straight(mapped(change, straight.lines), mapped(change, straight.result))


def _first_list(straight: Straight, module: nn.Module) -> Path | None:
    """Return the first of the outermost lists whose modules are used outside of any loop."""
    for line in straight.lines:
        for leaf in leaves(line):
            for path in _lists(leaf, module):
                return path
    return None


def _lists(leaf: Any, module: nn.Module) -> Iterator[Path]:
    path = leaf.path if isinstance(leaf, Own) else ()
    for length in range(len(path) - 1):
        if path[length + 1].isdigit() and _is_list(module, path[: length + 1]):
            yield path[: length + 1]
            return


def _is_list(module: nn.Module, path: Path) -> bool:
    return isinstance(owned(module, path), nn.ModuleList | nn.ParameterList)


def _with_loop(straight: Straight, path: Path, module: nn.Module) -> Straight:
    lines = straight.lines
    count = len(owned(module, path))
    starts = [_starting(lines, path, turn) for turn in range(count)]
    if None in starts:
        raise NotStraight(f"it uses only some modules of {'.'.join(path)}")
    first, second = (int(start or 0) for start in (starts + [len(lines)])[:2])
    width = second - first if count > 1 else 1
    reasons = []
    for shift in range(width):
        begin = first - shift
        try:
            return _rolled_at(straight, path, begin, width, count, module)
        except NotStraight as error:
            reasons.append(str(error))
    raise NotStraight(reasons[0])


def _starting(lines: Sequence[Any], path: Path, turn: int) -> int | None:
    wanted = (*path, str(turn))
    for place, line in enumerate(lines):
        if any(isinstance(leaf, Own) and leaf.path[: len(wanted)] == wanted for leaf in leaves(line)):  # fmt: skip
            return place
    return None


def _rolled_at(
    straight: Straight, path: Path, begin: int, width: int, count: int, module: nn.Module
) -> Straight:
    lines = straight.lines
    end = begin + width * count
    where = ".".join(path)
    if begin < 0 or end > len(lines) or any(isinstance(x, Repeat) for x in lines[begin:end]):
        raise NotStraight(f"it does not use the modules of {where} one like the other")
    turns = [_Turn(lines, begin, width, turn, module, count) for turn in range(count)]
    bodies = [turn.body() for turn in turns]
    lists = list(dict.fromkeys(item for turn in turns for item in turn.lists))
    body, carried = _carried(bodies, turns)
    names = _names(lists)
    uses_index = any(isinstance(x, Loop) and x.name == _INDEX for line in body for x in leaves(line))  # fmt: skip
    loop = Repeat(
        tuple(lists), tuple(names.values()), body, carried, _INDEX if uses_index else None
    )
    loop = replace(loop, body=_named(body, names), carried=_named(carried, names))
    return _behind(straight, loop, begin, end, width)


class _Turn:
    """The lines of one module of a list, in terms that all have in common."""

    def __init__(
        self,
        lines: Sequence[Line],
        begin: int,
        width: int,
        turn: int,
        module: nn.Module,
        count: int,
    ) -> None:
        self.lines = lines[begin + turn * width : begin + (turn + 1) * width]
        self.before = lines[begin + (turn - 1) * width : begin + turn * width] if turn else ()
        self.turn, self.module, self.count = turn, module, count
        self.lists: list[Path] = []
        self.here = {line.number: place for place, line in enumerate(self.lines)}
        self.there = {line.number: place for place, line in enumerate(self.before)}

    def body(self) -> tuple[Line, ...]:
        """Return the lines with `Loop` for what the turn tells."""
        return tuple(mapped(self._common, line) for line in self.lines)

    def _common(self, leaf: Any) -> Any:
        match leaf:
            case Own(path=path):
                return self._of_list(path)
            case Ref(number=number, path=path) if number in self.here:
                return _Mark("here", self.here[number], path)
            case Ref(number=number, path=path) if number in self.there:
                return _Mark("before", self.there[number], path)
        return leaf

    def _of_list(self, path: Path) -> Any:
        for length in range(len(path) - 1):
            head = path[: length + 1]
            is_turn = path[length + 1] == str(self.turn) and _is_list(self.module, head)
            if is_turn and len(owned(self.module, head)) == self.count:
                self.lists.append(head)
                return _Mark("item", head, path[length + 2 :])
        return Own(path)


def _carried(bodies: Any, turns: Any) -> tuple[Any, Any]:
    """Return the body in terms of its own results and of carried variables, and these."""
    firsts = turns[0].lines
    numbers = [line.number for line in firsts]
    starts: dict[Any, Any] = {}
    common = tuple(_common(each, starts) for each in zip(*bodies, strict=True))
    base = 1000 * (firsts[0].number + 1)
    made = {key: Ref(-1 - place - base) for place, key in enumerate(starts)}

    def change(value: Any) -> Any:
        match value:
            case _Mark(kind="here", place=place, path=path):
                return Ref(numbers[place], path)
            case _Mark(kind="before"):
                return made[value]
        return value

    body = tuple(
        replace(mapped(change, line), number=number)
        for line, number in zip(common, numbers, strict=True)
    )
    carried = tuple(
        (made[key], start, Ref(numbers[key.place], key.path)) for key, start in starts.items()
    )
    return body, carried


def _common(values: Sequence[Any], starts: dict[Any, Any]) -> Any:
    """Return what all turns have; note what the first has where later ones have a result of the turn
    before.

    Raises:
        NotStraight: they differ in something else.
    """
    first, *later = values
    carried = later[0] if later and all(value == later[0] for value in later) else None
    if isinstance(carried, _Mark) and carried.kind == "before":
        if starts.setdefault(carried, first) != first:
            raise NotStraight("a loop that begins with different values")
        return carried
    if all(type(value) is type(first) and value == first for value in values):
        return first
    if all(type(value) is int and value == turn for turn, value in enumerate(values)):
        return Loop(_INDEX)
    if any(type(value) is not type(first) for value in values):
        raise NotStraight("a loop whose turns do different things")
    if isinstance(first, tuple) and all(len(value) == len(first) for value in later):
        return tuple(_common(each, starts) for each in zip(*values, strict=True))
    if isinstance(first, slice):
        bounds = zip(*((v.start, v.stop, v.step) for v in values), strict=True)
        return slice(*(_common(each, starts) for each in bounds))
    if is_dataclass(first):
        kept = ("number", "value", "place") if isinstance(first, Line) else ("number", "value")
        names = [item.name for item in fields(first) if item.name not in kept]
        parts = {n: _common([getattr(v, n) for v in values], starts) for n in names}
        return replace(cast(Any, first), **parts)
    raise NotStraight("a loop whose turns do different things")


def _names(lists: Sequence[Path]) -> dict[Path, str]:
    """Return names of one module of each list."""
    found: dict[Path, str] = {}
    for path in lists:
        stem = path[-1].rstrip("s") if path[-1].isidentifier() else "item"
        stem = (
            stem if stem and stem not in found.values() and stem != path[-1] else f"{path[-1]}_item"
        )
        found[path] = stem
    return found


def _named(value: Any, names: dict[Path, str]) -> Any:
    def change(item: Any) -> Any:
        if isinstance(item, _Mark) and item.kind == "item":
            return Own((f"*{names[item.place]}", *item.path))
        return item

    return mapped(change, value)


def _behind(straight: Straight, loop: Repeat, begin: int, end: int, width: int) -> Straight:
    """Return the recording with the loop in the place of its turns."""
    lines = straight.lines
    last = {line.number: place for place, line in enumerate(lines[end - width : end])}
    gone = {line.number for line in lines[begin:end]}
    ends = {(end_.number, end_.path): ref for ref, _, end_ in loop.carried}

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, Ref) or leaf.number not in gone:
            return leaf
        if leaf.number not in last:
            raise NotStraight("results of single turns of a loop")
        first = lines[begin + last[leaf.number]].number
        return ends.get((first, leaf.path), Ref(first, leaf.path))

    after = tuple(mapped(change, line) for line in lines[end:])
    return Straight((*lines[:begin], loop, *after), mapped(change, straight.result))
