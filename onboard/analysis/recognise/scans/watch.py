"""Watch loops and stretches of statements inside methods of modeling code: the variables before
each and after it.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from onboard.analysis.recognise.bounds.value_guards import Guards
from onboard.analysis.source import find_method, function_node


@dataclass(frozen=True)
class Loop:
    """A loop, by the method that it stands in and its number among the loops there; or a stretch of
    statements likewise. A function is its own class and method.
    """

    class_name: str
    method: str
    index: int
    line: int
    stretch: bool = False


@dataclass
class LoopCall:
    """The variables before and after one run of a loop, tensors and lists of tensors; the module's
    own as `self.x`.
    """

    loop: Loop
    before: dict[str, Any]
    after: dict[str, Any]
    numbers: dict[str, Any] = field(default_factory=dict)
    """The module's own numbers and tuples of numbers, by name."""
    owner: Any = object
    """The module's class, or the function."""
    turns: int = 0
    """How often the loop's first line was come to: once more than its body, where it ended there."""
    guarded: bool = False
    """Whether something inside it bounds or asks what tensors hold."""
    guarded_ahead: bool = False
    """Whether something ahead of it in its method does."""
    tokens: int | None = None
    """The length of the text that the model had."""


def loops_of(owner: Any, method: str) -> list[ast.For]:
    """Return the outermost loops over ranges and slices in a class's method, or in a function."""
    return list(_loops(_body(owner, method)))


def loops_in(node: ast.FunctionDef) -> list[ast.For]:
    """Return the outermost loops over ranges and slices in a function of which the definition is given."""
    return list(_loops(node.body))


def _body(owner: Any, method: str) -> list[ast.stmt]:
    if not isinstance(owner, type):
        node = function_node(owner)
        return [] if node is None else node.body
    found = find_method(owner, method)
    return [] if found is None else found[1].body


_COUNTED = re.compile(r"\brange\(|\.unbind\(")
"""What a loop goes over that may be tokens."""


def _loops(statements: list[ast.stmt]) -> Iterator[ast.For]:
    for node in statements:
        if isinstance(node, ast.For) and _COUNTED.search(ast.unparse(node.iter)):
            yield node
        elif not isinstance(node, ast.For):
            for part in ("body", "orelse"):
                yield from _loops(getattr(node, part, []))


def stretches_of(owner: Any, method: str) -> list[list[ast.stmt]]:
    """Return the stretches of statements in a class's method that begin with a softplus and end with their
    block, or before what it does with caches; those without loops. A function has none.
    """
    return list(_stretches(_body(owner, method))) if isinstance(owner, type) else []


def _stretches(statements: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    for index, node in enumerate(statements):
        if isinstance(node, ast.Assign) and "softplus(" in ast.unparse(node.value):
            stretch = statements[index:]
            while isinstance(stretch[-1], ast.If | ast.Expr | ast.Return):
                stretch = stretch[:-1]
            if not any(isinstance(item, ast.For) for each in stretch for item in ast.walk(each)):
                yield stretch
            return
        for part in ("body", "orelse"):
            yield from _stretches(getattr(node, part, []))


@contextmanager
def loops_watched(
    model: nn.Module, calls: list[LoopCall], tokens: int | None = None
) -> Iterator[None]:
    """Note what loops in the methods of a model's modules do while these run on a text of so many
    tokens.
    """
    watched, guards, first = dict(_watched(model)), Guards(), len(calls)

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        return (
            _Watch(*watched[frame.f_code], calls, guards)
            if event == "call" and frame.f_code in watched
            else None
        )

    before = sys.gettrace()
    sys.settrace(trace if watched else before)
    try:
        with guards if watched else nullcontext():
            yield
    finally:
        sys.settrace(before)
        for call in calls[first:]:
            call.tokens = tokens


def _watched(model: nn.Module) -> Iterator[tuple[CodeType, _Watched]]:
    """Yield the code of methods, and of functions beside them, with loops."""
    classes = {type(module) for module in model.modules()}
    own = [cls for cls in classes if not cls.__module__.startswith("torch.")]
    for cls in own:
        for name, function in inspect.getmembers(cls, inspect.isfunction):
            if not name.startswith("__") and function.__module__ == cls.__module__:
                yield from _with_loops(cls, cls.__name__, name, function)
    for file in {cls.__module__ for cls in own}:
        for name, function in inspect.getmembers(sys.modules.get(file), inspect.isfunction):
            if function.__module__ == file and function.__name__ == name:
                yield from _with_loops(function, name, name, function)


def _with_loops(
    owner: Any, owner_name: str, name: str, function: Any
) -> Iterator[tuple[CodeType, _Watched]]:
    """Yield a function's code, and each of its loops with its last line, if it has any."""
    loops = [
        (Loop(owner_name, name, index, node.lineno), node.end_lineno or node.lineno)
        for index, node in enumerate(loops_of(owner, name))
    ]
    loops += [
        (Loop(owner_name, name, index, each[0].lineno, True), each[-1].end_lineno or 0)
        for index, each in enumerate(stretches_of(owner, name))
    ]
    if loops:
        yield inspect.unwrap(function).__code__, (owner, loops)


def lines_run(model: nn.Module, run: Callable[[], object]) -> dict[tuple[Path, int], str]:
    """Return the lines of the modules' own files, by file and number in the order of their first
    run, that ran.
    """
    own = {type(module).__module__ for module in model.modules()}
    files = {
        str(getattr(sys.modules[name], "__file__", ""))
        for name in own
        if not name.startswith("torch.")
    }
    lines: dict[tuple[Path, int], str] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        file = frame.f_code.co_filename
        if file not in files:
            return None
        if event == "line":
            lines.setdefault(
                (Path(file), frame.f_lineno), linecache.getline(file, frame.f_lineno).strip()
            )
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return lines


_Watched = tuple[Any, list[tuple[Loop, int]]]
"""A class or a function, and loops with their last lines."""


class _Watch:
    """Follows one call of a method line by line."""

    def __init__(
        self, owner: Any, loops: list[tuple[Loop, int]], calls: list[LoopCall], guards: Guards
    ) -> None:
        self.owner = owner
        self.loops = loops
        self.calls = calls
        self.guards = guards
        self.at_first = guards.count
        self.inside: _Inside | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> _Watch:
        line = frame.f_lineno
        if self.inside is not None and (event == "return" or not self.inside.has(line)):
            self.calls.append(self._call(self.inside, frame))
            self.inside = None
        if event == "line" and self.inside is None:
            found = next((item for item in self.loops if item[0].line == line), None)
            if found is not None:
                self.inside = _Inside(*found, _variables(frame), self.guards.count)
        if event == "line" and self.inside is not None:
            self.inside.turns += self.inside.loop.line == line
        return self

    def _call(self, run: _Inside, frame: FrameType) -> LoopCall:
        return LoopCall(
            run.loop,
            run.before,
            _variables(frame),
            _numbers(frame),
            type(frame.f_locals["self"]) if isinstance(self.owner, type) else self.owner,
            turns=run.turns,
            guarded=self.guards.count > run.guards,
            guarded_ahead=run.guards > self.at_first,
        )


@dataclass
class _Inside:
    """One run of a loop, from its first line to `last`."""

    loop: Loop
    last: int
    before: dict[str, Any]
    guards: int
    """How many were counted before."""
    turns: int = 0

    def has(self, line: int) -> bool:
        """Whether a line is the loop's."""
        return self.loop.line <= line <= self.last


def _variables(frame: FrameType) -> dict[str, Any]:
    module = frame.f_locals.get("self")
    own = (
        dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])
        if module
        else {}
    )
    values = {**frame.f_locals, **{f"self.{key}": value for key, value in own.items()}}
    return {key: _copy(value) for key, value in values.items() if _is_tensors(value)}


def _numbers(frame: FrameType) -> dict[str, Any]:
    own = vars(frame.f_locals["self"]) if "self" in frame.f_locals else {}
    return {f"self.{key}": value for key, value in own.items() if _is_numbers(value)}


def _is_numbers(value: Any) -> bool:
    items = value if isinstance(value, tuple | list) else [value]
    return all(type(item) in (int, float) for item in items)


def _is_tensors(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return all(isinstance(item, torch.Tensor) for item in items)


def _copy(value: Any) -> Any:
    return [item.clone() for item in value] if isinstance(value, list) else value.clone()
