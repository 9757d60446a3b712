"""A recorded forward: its calls in their order, and what their arguments are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any


class NotStraight(Exception):
    """What a forward does has no straight form; the message says why."""


@dataclass(frozen=True)
class Ref:
    """The result of a call, by its number, or a part of it."""

    number: int
    path: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Given:
    """A parameter of the forward, or a part of it."""

    name: str
    path: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Own:
    """A parameter, a buffer or a module of the module, by its path."""

    path: tuple[str, ...]


@dataclass(frozen=True)
class Size:
    """A dimension of a tensor that the forward is given."""

    of: Given
    dim: int


@dataclass(frozen=True)
class Of:
    """What a tensor has: `dtype`, `device`."""

    of: Any
    attr: str


@dataclass(frozen=True)
class Arithmetic:
    """`left op right`, or `op(left)` where there is one operand; `op` as Python has it."""

    op: str
    operands: tuple[Any, ...]


@dataclass(frozen=True)
class Loop:
    """The number, or an item, of the loop that a line lies in."""

    name: str


@dataclass(frozen=True)
class Made:
    """A tuple, list, dict or output that holds values: its class, names, and values."""

    cls: type
    names: tuple[Any, ...]
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Line:
    """One call."""

    kind: str
    """`function`, `method`, `module`, `operator`, `attribute`."""
    target: Any
    """A dotted name, the name of a method, the path of a module, ..."""
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    number: int = field(compare=False)
    """The result is `Ref(number)`."""
    place: tuple[str, int] = ("", 0)
    """File and line of the code that makes the call."""
    value: Any = field(default=None, compare=False, repr=False)
    """The result in the recording."""


@dataclass(frozen=True)
class Repeat:
    """Lines for each module of one or several lists of modules."""

    lists: tuple[tuple[str, ...], ...]
    items: tuple[str, ...]
    """The names of the modules in the lines."""
    body: tuple[Any, ...]
    carried: tuple[tuple[Ref, Any, Any], ...]
    """Variables, their values before the loop, and those behind each turn."""
    index: str | None = None
    """The name of the turn's number, where lines need it."""


@dataclass(frozen=True)
class Straight:
    """A recorded forward."""

    lines: tuple[Any, ...]
    result: Any


def owned(module: Any, path: tuple[str, ...]) -> Any:
    """Return what a module has under the path of an `Own`."""
    return reduce(getattr, path, module)


_HELD = {
    Made: ("values",),
    Arithmetic: ("operands",),
    Of: ("of",),
    Size: ("of",),
    Line: ("target", "args", "kwargs"),
    Repeat: ("body", "carried"),
    Straight: ("lines", "result"),
}


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a value with `change` applied to all that it is made of, innermost first."""
    if isinstance(value, tuple):
        return tuple(mapped(change, item) for item in value)
    if isinstance(value, slice):
        return slice(*(mapped(change, item) for item in (value.start, value.stop, value.step)))
    if type(value) in _HELD:
        names = _HELD[type(value)]
        value = replace(value, **{name: mapped(change, getattr(value, name)) for name in names})
    return change(value)


def leaves(value: Any) -> list[Any]:
    """Return all that a value is made of."""
    found: list[Any] = []

    def note(item: Any) -> Any:
        found.append(item)
        return item

    mapped(note, value)
    return found


def outer_leaves(value: Any) -> Iterator[Any]:
    """Yield what a value is made of, sizes and dtypes of tensors as they are."""
    if isinstance(value, tuple):
        for item in value:
            yield from outer_leaves(item)
    elif isinstance(value, slice):
        yield from outer_leaves((value.start, value.stop, value.step))
    elif type(value) in _HELD and not isinstance(value, Size | Of):
        for name in _HELD[type(value)]:
            yield from outer_leaves(getattr(value, name))
    else:
        yield value


def in_order(straight: Straight) -> Straight:
    """Return a recording with the calls that its result needs, each once and before the first that
    needs it, numbered from 0.
    """
    calls = {line.number: line for line in straight.lines}
    order: dict[int, int] = {}
    lines: list[Line] = []
    same: dict[str, int] = {}

    def visit(value: Any) -> None:
        for leaf in leaves(value):
            if isinstance(leaf, Ref) and leaf.number not in order:
                visit(calls[leaf.number])
                line = _numbered(calls[leaf.number], order)
                key = repr((line.kind, line.target, line.args, line.kwargs))
                if line.kind != "module" and key in same:
                    order[leaf.number] = same[key]
                    continue
                order[leaf.number] = same[key] = len(lines)
                lines.append(replace(line, number=len(lines)))

    visit(straight.result)
    return Straight(tuple(lines), _numbered(straight.result, order))


def _numbered(value: Any, order: dict[int, int]) -> Any:
    def change(leaf: Any) -> Any:
        return replace(leaf, number=order[leaf.number]) if isinstance(leaf, Ref) else leaf

    return mapped(change, value)
