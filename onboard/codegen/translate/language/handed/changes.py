"""What functions change of the objects that they are given: they return it beside their results, and
who calls them puts it where the objects are.

What nobody reads is not returned. Inside a function its arguments lie under names that no variable
has, too, so that branches and loops carry what becomes of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as Named

from onboard.codegen.translate.language.args import spread
from onboard.codegen.translate.language.forms import DICT, LIST
from onboard.codegen.translate.language.frame import GIVEN, Frame
from onboard.codegen.translate.language.handed import variables
from onboard.codegen.translate.language.handed.by_name import ByName
from onboard.codegen.translate.language.handed.left_in_arguments import Left, Path
from onboard.codegen.translate.language.holes import Hole, Result
from onboard.codegen.translate.language.state import Change, Routine
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.language.values import NONE, Code, Items, Known, Mapping, Value

_BACK = "back."
"""Begins the names under which the arguments of a call lie while it changes them."""


def hold(given: Named[str, Value], frame: Frame) -> dict[str, Value]:
    """Note what objects a function finds, so that what becomes of them is known at its end; return
    them.
    """
    objects = {key: value for key, value in given.items() if _may_change(value)}
    frame.env.values |= {f"{GIVEN}{key}": value for key, value in objects.items()}
    return objects


def _may_change(value: Value) -> bool:
    if isinstance(value, Code):
        return value.form in (LIST, DICT)
    return isinstance(value, ByName | Mapping | Left) or type(value) is Items


def replaced(before: Value, now: Value, frame: Frame) -> None:
    """Have whatever holds something hold what a body has made of it."""
    if isinstance(before, ByName):
        variables.replaced(before, now, frame)
    else:
        variables.rebind(before, now, frame)


def give(value: Value, frame: Frame, origin: ast.AST) -> None:
    """Have a function return a value, and know what has become of its arguments there."""
    statement = ast.Return(None)
    frame.returns.append((statement, value))
    frame.left[statement] = variables.held(frame)
    frame.emit(statement, origin)


def returned(function: object, given: Named[str, Value], frame: Frame) -> list[Change]:
    """Have a function return what it has changed, and somebody reads, in the order of its parameters;
    return all that it changes.

    Args:
        function: what tells it from others.
        given: its parameters.
    """
    program, order = frame.translator, [*spread(given)]
    wanted = [path for path in frame.changed if (function, path) in program.wanted]
    wanted.sort(key=lambda path: _place_in(order, "_".join(path)))
    if wanted:
        frame.returns = [
            (at, Items((value, *(_at(path, frame.left[at]) for path in wanted))))
            for at, value in frame.returns
        ]
    left = [path for path in frame.changed if path not in wanted]
    unread = [Change(path, Left(function, path, program.want)) for path in left]
    return [*(Change(path, None) for path in wanted), *unread]


def _place_in(order: Sequence[str], parameter: str) -> int:
    return order.index(parameter) if parameter in order else len(order)


def _at(path: Path, end: Named[str, Value]) -> Value:
    """Return the part at a path where a function returns."""
    part = end[f"{GIVEN}{path[0]}"]
    for key in path[1:]:
        if not isinstance(part, ByName) or key not in part.entries:
            raise Untranslatable(f"{'.'.join(path)}, which is there on one way to a return only")
        part = part.entries[key]
    return part


def same_changes(routines: Sequence[Routine]) -> bool:
    """Whether functions return the same parts of their arguments."""
    return all(each.handed_back == routines[0].handed_back for each in routines)


def take_back(
    value: Value, routines: Sequence[Routine], bound: Named[str, Value], frame: Frame
) -> Value:
    """Put what a call has changed where the caller has its arguments; return the call's result.

    Args:
        value: what the call gives, of a function that returns changes these beside its result.
        routines: those that may be called, which return the same.
        bound: the arguments, by parameter.

    Raises:
        Untranslatable: others have an argument, too.
    """
    changes = {change.path: change for routine in routines for change in routine.changes}
    parts: Iterator[Value] = iter(())
    if routines[0].handed_back:
        value, *rest = _named(value, routines[0], frame)
        parts = iter(rest)
    made = [(path, change.left or next(parts)) for path, change in changes.items()]
    made = [(path, part) for path, part in made if not isinstance(bound.get(path[0], NONE), Known)]
    _refuse_twice([path for path, _ in made], bound)
    frame.env.values |= {f"{_BACK}{path[0]}": bound[path[0]] for path, _ in made}
    for path, part in made:
        _put(path, part, frame)
    for path, _ in made:
        frame.env.values.pop(f"{_BACK}{path[0]}", None)
    return value


def _put(path: Path, part: Value, frame: Frame) -> None:
    owner = _owner_at(path, frame.env.values[f"{_BACK}{path[0]}"])
    if isinstance(owner, ByName) and path[1:]:
        variables.put(owner, path[-1], part, frame)
    else:
        variables.rebind(owner, part, frame)


def _refuse_twice(paths: Sequence[Path], bound: Named[str, Value]) -> None:
    """Raise `Untranslatable` where a function has something that it changes under two names."""
    for path in paths:
        if len(variables.places_of(_owner_at(path, bound[path[0]]), bound)) > 1:
            raise Untranslatable(f"a change of {'.'.join(path)}, which is given under two names")


def _owner_at(path: Path, argument: Value) -> Value:
    """Return what has the part at the end of a path that begins at an argument."""
    for key in path[1:-1]:
        assert isinstance(argument, ByName)
        argument = argument.entries[key]
    return argument


def _named(value: Value, routine: Routine, frame: Frame) -> Sequence[Value]:
    """Give what a call returns names: its result, and what it has changed."""
    if not isinstance(value, Result):
        assert isinstance(value, Items)
        return value.items
    assert isinstance(value.shape, Items)
    names: list[str] = []
    stems = ["outputs", *map("_".join, routine.handed_back)]
    for stem, part in zip(stems, value.shape.items, strict=True):
        for _ in range(_holes(part)):
            names.append(frame.fresh(stem))
            frame.env.values[names[-1]] = NONE
    result = frame.bind_result(value, names, None)
    assert isinstance(result, Items)
    return result.items


def _holes(shape: Value) -> int:
    return 1 if isinstance(shape, Hole) else sum(map(_holes, shape.parts()))
