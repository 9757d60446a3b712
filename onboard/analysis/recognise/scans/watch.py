"""Watch loops and stretches of statements inside methods of modeling code: the variables before
each and after it.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from onboard.analysis.source import find_method


@dataclass(frozen=True)
class Loop:
    """A loop, by the method that it stands in and its number among the loops there; or a stretch of
    statements likewise.
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
    cls: type = object
    """The module's class."""


def loops_of(cls: type, method: str) -> list[ast.For]:
    """Return the outermost loops over ranges in a method."""
    found = find_method(cls, method)
    return list(_loops(found[1].body)) if found is not None else []


def _loops(statements: list[ast.stmt]) -> Iterator[ast.For]:
    for node in statements:
        if isinstance(node, ast.For) and "range" in ast.unparse(node.iter):
            yield node
        elif not isinstance(node, ast.For):
            for part in ("body", "orelse"):
                yield from _loops(getattr(node, part, []))


def stretches_of(cls: type, method: str) -> list[list[ast.stmt]]:
    """Return the stretches of statements in a method that begin with a softplus and end with their
    block, or before what it does with caches; those without loops.
    """
    found = find_method(cls, method)
    return list(_stretches(found[1].body)) if found is not None else []


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
def loops_watched(model: nn.Module, calls: list[LoopCall]) -> Iterator[None]:
    """Note what loops in the methods of a model's modules do while these run."""
    watched = dict(_watched(model))

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        return (
            _Watch(watched[frame.f_code], calls)
            if event == "call" and frame.f_code in watched
            else None
        )

    before = sys.gettrace()
    sys.settrace(trace if watched else before)
    try:
        yield
    finally:
        sys.settrace(before)


def _watched(model: nn.Module) -> Iterator[tuple[CodeType, list[tuple[Loop, int]]]]:
    """Yield the code of methods with loops, and each loop with its last line."""
    for cls in {
        type(module)
        for module in model.modules()
        if not type(module).__module__.startswith("torch.")
    }:
        for name, function in inspect.getmembers(cls, inspect.isfunction):
            if name.startswith("__") or function.__module__ != cls.__module__:
                continue
            loops = [
                (Loop(cls.__name__, name, index, node.lineno), node.end_lineno or node.lineno)
                for index, node in enumerate(loops_of(cls, name))
            ]
            loops += [
                (Loop(cls.__name__, name, index, each[0].lineno, True), each[-1].end_lineno or 0)
                for index, each in enumerate(stretches_of(cls, name))
            ]
            if loops:
                yield inspect.unwrap(function).__code__, loops


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


class _Watch:
    """Follows one call of a method line by line."""

    def __init__(self, loops: list[tuple[Loop, int]], calls: list[LoopCall]) -> None:
        self.loops = loops
        self.calls = calls
        self.inside: tuple[Loop, int] | None = None
        self.before: dict[str, Any] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> _Watch:
        line = frame.f_lineno
        if self.inside is not None and (
            event == "return" or not self.inside[0].line <= line <= self.inside[1]
        ):
            cls = type(frame.f_locals.get("self"))
            after = _variables(frame)
            self.calls.append(LoopCall(self.inside[0], self.before, after, _numbers(frame), cls))
            self.inside = None
        if self.inside is None and event == "line":
            self.inside = next((item for item in self.loops if item[0].line == line), None)
            self.before = _variables(frame) if self.inside is not None else {}
        return self


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
    own = vars(frame.f_locals.get("self", object))
    return {f"self.{key}": value for key, value in own.items() if _is_numbers(value)}


def _is_numbers(value: Any) -> bool:
    items = value if isinstance(value, tuple | list) else [value]
    return all(type(item) in (int, float) for item in items)


def _is_tensors(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return all(isinstance(item, torch.Tensor) for item in items)


def _copy(value: Any) -> Any:
    return [item.clone() for item in value] if isinstance(value, list) else value.clone()
