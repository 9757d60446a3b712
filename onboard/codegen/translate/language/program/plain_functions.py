"""Functions of constructors that compute numbers and tables in plain Python: recursion, loops that
fill lists, functions inside functions. They are written as they are, and called.

Nothing of them is evaluated here: they read what they are given, and nothing else.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from onboard.analysis.source import ModuleSource
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.program.argument_facts import (
    bind,
    default_fact,
    default_nodes,
)
from onboard.codegen.translate.language.state import Routine
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, name
from onboard.codegen.translate.language.values import Code, Items, Known, Value
from onboard.vetting import allowed_names

_MODULES = {"math": math, "torch": torch}
_STATEMENTS = (
    *(ast.Return, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.If, ast.Expr, ast.Pass),
    *(ast.Assert, ast.Raise, ast.While, ast.Continue, ast.Break, ast.FunctionDef),
)
_EXPRESSIONS = (
    *(ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Compare, ast.Call, ast.Lambda, ast.Dict),
    *(ast.List, ast.Tuple, ast.ListComp, ast.GeneratorExp, ast.comprehension, ast.Constant),
    *(ast.Attribute, ast.Subscript, ast.Slice, ast.Starred, ast.Name, ast.keyword, ast.JoinedStr),
    *(ast.FormattedValue, ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context),
    *(ast.arguments, ast.arg),
)
_DRAWN = ("rand", "normal", "bernoulli", "empty", "uniform")
"""Parts of names of what gives other numbers each time."""


_COPIES = 4
"""Names that are tried for one."""


class _OtherCode(Exception):
    """A function that does more than compute with what it is given."""


def or_as_it_is(
    called: Callable[[], Value],
    node: ast.FunctionDef,
    source: ModuleSource,
    args: Args,
    frame: Frame,
    seen: Collection[str] = (),
) -> Value:
    """Return what a call comes to; where it has no translation, a call of the function as it is, which
    may read none of `seen`, variables around it.
    """
    emitted, guards = len(frame.out), [] if frame.cls is None else list(frame.cls.guards)
    try:
        return called()
    except Untranslatable:
        if (plain := as_it_is(node, source, args, frame, seen)) is None:
            raise
        del frame.out[emitted:]
        if frame.cls is not None:
            frame.cls.guards[:] = guards
        return plain


def as_it_is(
    node: ast.FunctionDef,
    source: ModuleSource,
    args: Args,
    frame: Frame,
    seen: Collection[str] = (),
) -> Value | None:
    """Return a call of a function of a repository as it is, of what config and constants say; None
    where it does more than compute.
    """
    given = [*args.positional, *args.keywords.values()]
    plain = all(isinstance(each, Known | Code | Items) and each.is_static for each in given)
    if not (frame.translator.specialised and plain and given) or args.stars:
        return None
    try:
        writer = _Writer(source, frame.translator.functions, seen)
        called = writer.write(node)
        bound, rest = bind(node, args, method=False)
    except _OtherCode:
        return None
    known = frame.translator.functions
    values = {key: default_fact(each) for key, each in default_nodes(node).items()} | bound
    parameters = writer.written[called].parameters
    if rest or values.keys() != set(parameters):
        return None
    known.update(writer.written)
    return Code(ast.Call(name(called), [values[key].code() for key in parameters], []), static=True)


@dataclass
class _Writer:
    """Copies of functions that compute, and of those that they call."""

    source: ModuleSource
    known: Mapping[str, Routine]
    seen: Collection[str]
    written: dict[str, Routine] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    """Functions of the file -> what their copies are called: others may have their names."""

    def write(self, node: ast.FunctionDef) -> str:
        """Copy a function, and return what it is called; raise `_OtherCode` where it does more than
        compute.
        """
        free = (node.name, *(f"{node.name}_{number}" for number in range(1, _COPIES)))
        called = next((key for key in free if self._is_free(key, node)), None)
        if called is None:
            raise _OtherCode
        self.names[node.name] = called
        copy = _Bare().visit(deepcopy(node))
        others = copy.args.vararg or copy.args.kwarg or copy.args.posonlyargs
        if others or not copy.body:
            raise _OtherCode
        own = set(_bound(copy)) - {node.name}
        copy.body = [_Global(self, own).visit(each) for each in copy.body]
        for part in copy.body:
            for each in ast.walk(part):
                _check(each)
        if not any(isinstance(each, ast.Return) for each in ast.walk(copy)):
            raise _OtherCode
        parameters = [item.arg for item in (*copy.args.args, *copy.args.kwonlyargs)]
        facts: dict[str, Value] = {key: Code(name(key), static=True) for key in parameters}
        self.written[called] = Routine(
            node, self.source, parameters, copy.body, Code(name(called)), 1, True, facts, plain=True
        )
        return called

    def _is_free(self, key: str, node: ast.FunctionDef) -> bool:
        found = self.known.get(key)
        return found is None or (found.plain and found.node is node)

    def named(self, key: str) -> ast.expr:
        """Return what a name of the module stands for: a module, a constant, a function that is
        copied, too.
        """
        if key in self.names:
            return name(self.names[key])
        if key in self.seen:
            raise _OtherCode
        found: Any = self.source.namespace.get(key, getattr(builtins, key, None))
        if key in _MODULES and found is _MODULES[key]:
            return name(key)
        if isinstance(found, bool | int | float | str):
            return ast.Constant(found)
        if getattr(found, "__module__", None) == "math" and hasattr(math, key):
            return attribute(name("math"), key)
        if key in allowed_names.BUILTINS and found is getattr(builtins, key):
            return name(key)
        called = self.source.functions.get(key)
        if not inspect.isfunction(found) or called is None:
            raise _OtherCode
        return name(self.write(called))


def _bound(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the names that a function, and those inside it, give values."""
    for node in ast.walk(function):
        match node:
            case ast.Name(id=key, ctx=ast.Store()) | ast.arg(arg=key) | ast.FunctionDef(name=key):
                yield key


def _check(node: ast.AST) -> None:
    """Raise `_OtherCode` at what could do more than compute, or draws numbers."""
    if not isinstance(node, _STATEMENTS + _EXPRESSIONS):
        raise _OtherCode
    match node:
        case ast.Attribute(attr=attr):
            dotted = ast.unparse(node)
            module = dotted.split(".")[0] in _MODULES
            listed = dotted in allowed_names.DOTTED if module else attr in allowed_names.ATTRIBUTES
            drawn = any(part in attr for part in _DRAWN)
            if not listed or drawn or not isinstance(node.ctx, ast.Load):
                raise _OtherCode
        case ast.FunctionDef() if node.decorator_list:
            raise _OtherCode


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class _Bare(ast.NodeTransformer):
    """Takes annotations and docstrings away."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Take them away."""
        node.returns = None
        node.body = [item for item in node.body if not _is_text(item)]
        self.generic_visit(node)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        """Take its type away."""
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        """Assign without the type."""
        self.generic_visit(node)
        return node if node.value is None else ast.Assign([node.target], node.value)


class _Global(ast.NodeTransformer):
    """Writes what the module's names stand for."""

    def __init__(self, writer: _Writer, own: set[str]) -> None:
        self.writer, self.own = writer, own

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Look the name up, unless it is a variable."""
        return node if node.id in self.own else self.writer.named(node.id)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Give a function that is copied all that it takes: a copy has no defaults."""
        called = self.writer.source.functions.get(ast.unparse(node.func))
        self.generic_visit(node)
        if called is None or ast.unparse(node.func) not in self.writer.names.values():
            return node
        left = [item.arg for item in called.args.args][len(node.args) :]
        left += [item.arg for item in called.args.kwonlyargs]
        given = {item.arg for item in node.keywords}
        defaults = default_nodes(called)
        if None in given or any(isinstance(item, ast.Starred) for item in node.args):
            raise _OtherCode
        for key in left:
            if key not in given:
                node.keywords.append(ast.keyword(key, self.visit(deepcopy(defaults[key]))))
        return node
