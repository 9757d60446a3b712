"""The definition of a method that does what was recorded."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from transformers.utils import ModelOutput

from onboard.codegen.straight.recorded_names import Names
from onboard.codegen.straight.straight_lines import (
    Arithmetic,
    Given,
    Line,
    Loop,
    Made,
    NotStraight,
    Of,
    Own,
    Ref,
    Repeat,
    Size,
    Straight,
    leaves,
)
from onboard.codegen.straight.torch_calls import OPERATORS, TURNED, UNARY
from onboard.codegen.translate.language.trees.syntax import attribute, call, constant, name


def definition(straight: Straight, original: ast.FunctionDef) -> ast.FunctionDef:
    """Return the method that does what was recorded of `original`, with its parameters.

    Raises:
        NotStraight: it holds a value that cannot be written.
    """
    arguments = deepcopy(original.args)
    taken = {item.arg for item in ast.walk(arguments) if isinstance(item, ast.arg)}
    printer = _Printer(Names(taken), straight)
    body = printer.statements(straight.lines)
    body.append(ast.Return(printer.expression(straight.result)))
    made = deepcopy(original)
    made.args, made.body, made.decorator_list, made.returns = arguments, body, [], None
    for node in ast.walk(made):
        if isinstance(node, ast.stmt | ast.expr):
            node.lineno = node.end_lineno = original.lineno
            node.col_offset = node.end_col_offset = 0
    return ast.fix_missing_locations(made)


class _Printer:
    def __init__(self, names: Names, straight: Straight) -> None:
        self.names = names
        self.used = {item for item in leaves(straight) if isinstance(item, Ref)}
        self.variables: dict[Ref, str] = {}
        self.items: dict[str, str] = {}

    def statements(self, lines: tuple[Any, ...]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for index, line in enumerate(lines):
            if isinstance(line, Repeat):
                found += self._loop(line)
            else:
                found.append(self._statement(line, lines[index + 1 : index + 2]))
        return found

    def _statement(self, line: Line, behind: tuple[Any, ...]) -> ast.stmt:
        wanted = self.names.of(line, behind)
        parts = self._parts(line)
        value = self._call(line)
        if not parts:
            variable = self.names.fresh(wanted[0] if len(wanted) == 1 else _stem(line))
            self.variables[Ref(line.number)] = variable
            return ast.Assign([name(variable, store=True)], value)
        stems = wanted if len(wanted) == len(parts) else [_stem(line)] * len(parts)
        targets: list[ast.expr] = []
        for part, stem in zip(parts, stems, strict=True):
            used = any(item.number == part.number and item.path[:1] == part.path for item in self.used)  # fmt: skip
            variable = self.names.fresh(stem) if used else "_"
            self.variables[part] = variable
            targets.append(name(variable, store=True))
        return ast.Assign([ast.Tuple(targets, ast.Store())], value)

    def _parts(self, line: Line) -> list[Ref]:
        """Return the parts of a result that is taken apart."""
        value = line.value
        if not isinstance(value, tuple | list) or isinstance(value, torch.Size):
            return []
        refs = [item for item in self.used if item.number == line.number]
        if any(not item.path for item in refs) or len(value) > 8:
            return []
        return [Ref(line.number, (index,)) for index in range(len(value))]

    def _loop(self, loop: Repeat) -> list[ast.stmt]:
        before: list[ast.stmt] = []
        for ref, start, _ in loop.carried:
            variable = self.names.fresh("hidden_states")
            before.append(ast.Assign([name(variable, store=True)], self.expression(start)))
            self.variables[ref] = variable
        names = [*loop.items, *([loop.index] if loop.index else [])]
        self.items |= {item: self.names.fresh(item) for item in names}
        body = self.statements(loop.body)
        for ref, _, end in loop.carried:
            target = name(self.variables[ref], store=True)
            body.append(ast.Assign([target], self.expression(end)))
        lists = [_own(path, {}) for path in loop.lists]
        items: list[ast.expr] = [name(self.items[item], store=True) for item in loop.items]
        source = lists[0] if len(lists) == 1 else call(name("zip"), *lists)
        target_: ast.expr = items[0] if len(items) == 1 else ast.Tuple(items, ast.Store())
        if loop.index is not None:
            source = call(name("enumerate"), source)
            target_ = ast.Tuple([name(self.items[loop.index], store=True), target_], ast.Store())
        return [*before, ast.For(target_, source, body, [], lineno=0)]

    def _call(self, line: Line) -> ast.expr:
        if line.target == "__getitem__":
            owner, index = line.args
            return ast.Subscript(self.expression(owner), self._index(index), ast.Load())
        args = [self.expression(item) for item in line.args]
        keywords = {key: self.expression(item) for key, item in line.kwargs}
        if line.kind == "attribute":
            return attribute(args[0], line.target)
        if line.kind == "module":
            return call(self.expression(line.target), *args, **keywords)
        if line.kind == "own":
            return call(name(line.target), *args, **keywords)
        short = line.target.rpartition(".")[2]
        if (operator := _operator(short, args, keywords)) is not None:
            return operator
        if line.kind == "method":
            if re.fullmatch(r"__\w+__", short):
                raise NotStraight(f"a call of {short}")
            return call(attribute(args[0], short), *args[1:], **keywords)
        return call(_dotted(line.target), *args, **keywords)

    def _index(self, index: Any) -> ast.expr:
        if isinstance(index, Made) and index.cls is tuple:
            return ast.Tuple([self._index(item) for item in index.values], ast.Load())
        if isinstance(index, slice):
            bounds = (index.start, index.stop, index.step)
            made = [None if item is None else self.expression(item) for item in bounds]
            return ast.Slice(*made)
        return self.expression(index)

    def expression(self, value: Any) -> ast.expr:
        """Return the code of an argument."""
        match value:
            case Ref(path=path):
                return self._result(value, path)
            case Given(name=parameter, path=path):
                return _read(name(parameter), path)
            case Own(path=path):
                return _own(path, self.items)
            case Loop(name=variable):
                return name(self.items[variable])
            case Size(of=of, dim=dim):
                shape = attribute(self.expression(of), "shape")
                return ast.Subscript(shape, ast.Constant(dim), ast.Load())
            case Of(of=of, attr=attr):
                return attribute(self.expression(of), attr)
            case Arithmetic():
                return self._arithmetic(value)
            case Made():
                return self._made(value)
            case torch.device():
                return call(_dotted("torch.device"), constant(str(value)))
            case torch.dtype() | torch.layout() | torch.memory_format():
                return _dotted(str(value))
            case int() | float() if value < 0:
                return ast.UnaryOp(ast.USub(), constant(-value))
        return constant(value)

    def _result(self, ref: Ref, path: tuple[Any, ...]) -> ast.expr:
        for length in range(len(path) + 1):
            found = self.variables.get(Ref(ref.number, path[:length]))
            if found is not None:
                return _read(name(found), path[length:])
        raise NotStraight("a value of an earlier turn of a loop")

    def _arithmetic(self, value: Arithmetic) -> ast.expr:
        made = [self.expression(item) for item in value.operands]
        if value.op[0].isalpha():
            return call(_dotted(value.op), *made)
        text = f"({ast.unparse(made[0])}) {value.op} ({ast.unparse(made[1])})"
        return ast.parse(text, mode="eval").body

    def _made(self, value: Made) -> ast.expr:
        items = [self.expression(item) for item in value.values]
        if issubclass(value.cls, ModelOutput):
            named = [key.removeprefix(".") for key in value.names]
            return call(name(value.cls.__name__), **dict(zip(named, items, strict=True)))
        if value.cls is dict:
            return ast.Dict([constant(key) for key in value.names], list(items))
        if issubclass(value.cls, list):
            return ast.List(items, ast.Load())
        if issubclass(value.cls, tuple):
            return ast.Tuple(items, ast.Load())
        raise NotStraight(f"a value of type {value.cls.__name__}")


def _operator(short: str, args: list[ast.expr], keywords: dict[str, ast.expr]) -> ast.expr | None:
    if keywords:
        return None
    if short in UNARY and len(args) == 1:
        return ast.parse(f"{UNARY[short]}({ast.unparse(args[0])})", mode="eval").body
    if len(args) != 2 or short not in {**OPERATORS, **TURNED}:
        return None
    first, second = args if short in OPERATORS else reversed(args)
    sign = OPERATORS.get(short) or TURNED[short]
    return ast.parse(f"({ast.unparse(first)}) {sign} ({ast.unparse(second)})", mode="eval").body


def _dotted(path: str) -> ast.expr:
    first, *rest = path.split(".")
    return attribute(name(first), *rest)


def _own(path: tuple[str, ...], items: Mapping[str, str]) -> ast.expr:
    made: ast.expr = name("self")
    if path[0].startswith("*"):  # an item of a loop
        made, path = name(items[path[0][1:]]), path[1:]
    for part in path:
        if part.isdigit():
            made = ast.Subscript(made, ast.Constant(int(part)), ast.Load())
        elif part.isidentifier() and not keyword.iskeyword(part):
            made = attribute(made, part)
        else:
            made = ast.Subscript(made, ast.Constant(part), ast.Load())
    return made


def _read(owner: ast.expr, path: tuple[Any, ...]) -> ast.expr:
    for key in path:
        if isinstance(key, str) and key.startswith("."):
            owner = attribute(owner, key[1:])
        else:
            owner = ast.Subscript(owner, constant(key), ast.Load())
    return owner


def _stem(line: Line) -> str:
    """Return what the result of a call is called by what is called."""
    target = line.target
    if isinstance(target, Own):
        target = next((part for part in reversed(target.path) if not part.isdigit()), "")
    elif isinstance(target, Loop):
        target = target.name
    short = str(target).rpartition(".")[2].strip("_").lower()
    known = {"add": "total", "getitem": "part", "mul": "product", "sub": "difference"}
    short = known.get(short, short)
    usable = short.isidentifier() and not keyword.iskeyword(short) and not hasattr(builtins, short)
    return short if usable else f"{short}_result" if short.isidentifier() else "result"
