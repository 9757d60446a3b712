"""What another function makes of the choices of tokens' experts, and hands to the statements that are
the mixture: a dict of each expert's tokens, a list of masks.

The end of that function, which makes it of tensors, and the statements that read it are run as one
stretch; in the model file the function hands the tensors themselves on.
"""

from __future__ import annotations

import ast
import builtins
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from onboard.analysis.recognise import REFUSED
from onboard.analysis.recognise.recorder import ModuleCall
from onboard.analysis.recognise.stretches import Region, read_first
from onboard.analysis.source import module_source


@dataclass(frozen=True)
class Joined:
    """A region with the end of another function before it, which makes one of its variables."""

    region: Region
    variables: dict[str, Any]
    handed: dict[str, Any]
    """Which variable of the region, and which function's end makes it of what."""


@dataclass
class _Run:
    """One call of a function: its variables before the first run of each line, what it returned."""

    code: CodeType
    names: dict[str, Any]
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)
    owner: Any = None
    """The object whose method it is, if any."""
    result: Any = None

    def place(self, value: Any) -> int | None:
        """Return where a value lies in the tuple that was returned, -1 for all of it; None: nowhere."""
        if self.result is value:
            return -1
        parts = self.result if isinstance(self.result, tuple) else ()
        return next((index for index, part in enumerate(parts) if part is value), None)

    def definition(self) -> ast.FunctionDef | None:
        """Return the code of a function of a file, or of a method."""
        source = module_source(self.names["__name__"])
        methods = (node for each in source.classes.values() for node in each.body)
        for node in (*source.functions.values(), *methods):
            if isinstance(node, ast.FunctionDef) and node.name == self.code.co_name:
                lines = [node.lineno, *(item.lineno for item in node.decorator_list)]
                if min(lines) == self.code.co_firstlineno:
                    return node
        return None


def joined(makers: Makers, region: Region, variables: dict[str, Any]) -> Iterator[Joined]:
    """Yield a region behind ends of the function that makes a variable of it which is a table, a list
    or a mask, or has zeros; those that begin late come first.
    """
    for variable in read_first(region.statements):
        if not _is_routing(variables.get(variable)):
            continue
        run, place, through = makers.of(region, variable)
        function = None if run is None else run.definition()
        if run is None or function is None:
            continue
        rest = {key: item for key, item in variables.items() if key != variable}
        for begin in range(len(function.body) - 1, -1, -1):
            end = _end(run, function, begin, place, variable)
            if end is not None:
                first, known, handed = end
                whole = replace(region, statements=(*first, *region.statements))
                yield Joined(whole, rest | known, handed | {"through": through})


def _end(
    run: _Run, function: ast.FunctionDef, begin: int, place: int, variable: str
) -> tuple[list[ast.stmt], dict[str, Any], dict[str, Any]] | None:
    """Return the end of a function, from a statement on, as statements that make a variable; what
    their names stand for before, and what a model file is told of it. None where it is no such end.
    """
    *tail, last = function.body[begin:]
    value, before = _value(tail, last, place), run.lines.get(function.body[begin].lineno)
    if value is None or before is None:
        return None
    made = _Prefixed(variable, run.names | before)
    first = [made.visit(copy.deepcopy(node)) for node in tail]
    target = ast.Name(variable, ast.Store())
    first.append(ast.Assign([target], made.visit(copy.deepcopy(value)), lineno=0))
    read = read_first([*tail, ast.Expr(value)])
    handed = {
        "variable": variable,
        "file": module_source(run.names["__name__"]).path.name,
        "function": function.name,
        "line": function.lineno,
        "begin": begin,
        "place": place,
        "tensors": [name for name in read if isinstance(before.get(name), torch.Tensor)],
    }
    return first, made.known, handed


class _Prefixed(ast.NodeTransformer):
    """Gives what a function's code reads and assigns names of its own."""

    def __init__(self, prefix: str, values: dict[str, Any]) -> None:
        self.prefix, self.values = prefix, values
        self.known: dict[str, Any] = {}
        """What these names stand for, where it is there before."""

    def visit_Name(self, node: ast.Name) -> ast.Name:
        """Rename a variable that is no function of Python itself."""
        if node.id not in self.values and hasattr(builtins, node.id):
            return node
        new = f"{self.prefix}_{node.id}"
        if node.id in self.values:
            self.known[new] = self.values[node.id]
        return ast.copy_location(ast.Name(new, node.ctx), node)


def _is_routing(value: Any) -> bool:
    """Whether a value is made of choices: a table or a list with tensors, a mask, or weights of all
    experts, those that are not chosen 0.
    """
    if isinstance(value, torch.Tensor):
        return value.dim() > 0 and bool(not value.is_floating_point() or (value == 0).any())
    inside = value.values() if isinstance(value, dict) else value
    return isinstance(value, dict | list | tuple) and any(
        isinstance(each, torch.Tensor) or _is_routing(each) for each in inside
    )


def _value(tail: Sequence[ast.stmt], last: ast.stmt, place: int) -> ast.expr | None:
    """Return what the last statement of a function returns at a place, where it is the only one that
    returns, and nothing else there is of the statements before.
    """
    if not isinstance(last, ast.Return) or last.value is None:
        return None
    inside = [node for statement in tail for node in ast.walk(statement)]
    if any(isinstance(node, ast.Return) for node in inside):
        return None
    if place < 0:
        return last.value
    if not isinstance(last.value, ast.Tuple):
        return None
    stored = {x.id for x in inside if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    others = [item for index, item in enumerate(last.value.elts) if index != place]
    read = {x.id for item in others for x in ast.walk(item) if isinstance(x, ast.Name)}
    return None if stored & read else last.value.elts[place]


class Makers:
    """The functions of a repository's code that returned something in one call of a module, which runs
    when the first is asked for.
    """

    def __init__(self, module: nn.Module, call: ModuleCall) -> None:
        self.module, self.call = module, call
        self.package = type(module).__module__.partition(".")[0]
        self.runs: list[_Run] = []

    def of(self, region: Region, variable: str) -> tuple[_Run | None, int, list[str]]:
        """Return the first that returned a variable of a region, at which place, and the paths of the
        modules whose forwards returned it.
        """
        runs, line = self._traced, region.statements[0].lineno
        own = [
            run for run in runs if run.owner is self.module and run.code.co_name == region.method
        ]
        value = own[0].lines.get(line, {}).get(variable) if own else None
        places = [(run, run.place(value)) for run in runs if value is not None]
        handing = [(run, place) for run, place in places if place is not None]
        owners = [run.owner for run, _ in handing if run.code.co_name == "forward"]
        parts = self.module.named_modules()
        through = [path for path, part in parts if path and any(part is x for x in owners)]
        return (*handing[0], through) if handing else (None, -1, [])

    @cached_property
    def _traced(self) -> list[_Run]:
        """What ran, in the order in which it returned; nothing where the call cannot run again."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            with torch.no_grad():
                self.module(*self.call.args, **self.call.kwargs)
        except REFUSED:  # its inputs were changed while it ran
            return []
        finally:
            sys.settrace(before)
        return self.runs

    def _trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        file = str(frame.f_globals.get("__name__")).partition(".")[0]
        if file != self.package or frame.f_code.co_name.startswith("<"):  # a comprehension
            return None
        run = _Run(frame.f_code, frame.f_globals, owner=frame.f_locals.get("self"))

        def inside(frame: FrameType, event: str, given: Any) -> Callable[..., Any]:
            if event == "line":
                run.lines.setdefault(frame.f_lineno, dict(frame.f_locals))
            elif event == "return":
                run.result = given
                self.runs.append(run)
            return inside

        return inside
