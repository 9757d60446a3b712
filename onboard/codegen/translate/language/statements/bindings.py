"""Statements that bind names: definitions, imports, `global`."""

from __future__ import annotations

import ast
from copy import deepcopy
from dataclasses import replace

from onboard.analysis.source import ModuleSource
from onboard.codegen.translate.language.expressions.decisions import WrittenOut
from onboard.codegen.translate.language.expressions.objects import from_namespace, imported
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.object_values import (
    Closure,
    Config,
    Global,
    Instance,
    ModuleRows,
    ModuleTable,
    Self,
)
from onboard.codegen.translate.language.trees.syntax import (
    Untranslatable,
    attribute,
    name,
    stored_names,
)
from onboard.codegen.translate.language.values import Code, Known, Unread, Value

SAYING = ("print(", "logger.", "logging.", "warnings.")
_OF_MESSAGES = (
    *(ast.If, ast.Assign, ast.AugAssign, ast.Expr, ast.Pass, ast.Name, ast.expr_context),
    *(ast.Constant, ast.JoinedStr, ast.FormattedValue, ast.Attribute, ast.Call, ast.keyword),
    *(ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.operator),
    *(ast.boolop, ast.unaryop, ast.cmpop),
)


def define(node: ast.FunctionDef, frame: Frame) -> None:
    """Bind a function that is defined inside another one."""
    if not frame.translator.specialised:
        raise Untranslatable(f"{node.name}, defined at {frame.source.location(node)}")
    frame.env.values[node.name] = Closure(node, frame.source, dict(frame.env.values), frame)


def of_itself(function: Closure, attr: str, frame: Frame) -> Closure:
    """Return a function that a constructor leaves at `self.attr`, where other methods may call it:
    what it reads of the constructor's variables stands in attributes.

    Raises:
        Untranslatable: a variable holds what depends on a tensor.
    """
    function = _of_attributes(function)
    read = {item.id for item in ast.walk(function.node) if isinstance(item, ast.Name)}
    seen = {key: value for key, value in function.seen.items() if key in read}
    held = {key: _held(f"{attr}_{key}", value, function, frame) for key, value in seen.items()}
    return replace(function, seen=held, home=None)


def _of_attributes(function: Closure) -> Closure:
    """Return a function that says `self.part` where it reads a variable that is this module."""
    modules = {
        key: value.code()
        for key, value in function.seen.items()
        if isinstance(value, Instance | ModuleTable | ModuleRows)
    }
    places = {key: code for key, code in modules.items() if ast.unparse(code).startswith("self.")}
    return replace(function, node=WrittenOut(places).visit(deepcopy(function.node)))


def _held(attr: str, value: Value, function: Closure, frame: Frame) -> Value:
    """Return a variable's value as other methods find it: at `self.attr`, or where it is already."""
    if isinstance(value, Known | Global | Closure | Self):
        return value
    if not isinstance(value, Code | Config) or not value.is_static:
        raise Untranslatable(f"{function.node.name}, which reads variables of a constructor")
    there = [key for key, known in frame.env.values.items() if known.equals(value)]
    path = next((key for key in there if key.startswith("self.")), f"self.{attr}")
    place = attribute(name("self"), path.removeprefix("self."))
    if path not in frame.env.values:
        store = ast.Attribute(name("self"), attr, ast.Store())
        frame.emit(ast.Assign([store], value.code()), function.node)
        frame.env.values[path] = replace(value, expr=place)
    return replace(value, expr=place)


def bring(node: ast.Import | ast.ImportFrom, frame: Frame) -> None:
    """Bind what is imported inside a function, as far as it is there."""
    for alias in node.names:
        key = (alias.asname or alias.name).split(".")[0]
        if (found := imported(node, alias, frame.source.module)) is not None:
            frame.env.values[key] = from_namespace(found, key, frame)


def begin(node: ast.Global, frame: Frame) -> None:
    """Bind names of the module that a function assigns to what they hold before the first call;
    what a constructor counts there nothing may read.
    """
    for key in _assigned(node, frame.source):
        if frame.kind == "init" and frame.translator.specialised:
            reason = f"the global {key}, assigned at {frame.source.location(node)}"
            frame.env.values[key] = Unread(reason)
            continue
        _nothing_yet(key, node, frame.source)
        frame.env.values[key] = Known(None)


def first_values(node: ast.Global, source: ModuleSource) -> list[ast.Assign]:
    """Return the assignments of what the names of `global a, b` hold before the first call, as
    generated code has it at each call: what one call leaves there, the next one would make again.

    Raises:
        Untranslatable: the module makes one of them with code, or leaves something there.
    """
    return [
        ast.copy_location(ast.Assign([name(key, store=True)], value), node)
        for key in _assigned(node, source)
        for value in [_nothing_yet(key, node, source)]
    ]


def _assigned(node: ast.Global, source: ModuleSource) -> list[str]:
    """Return the names of `global a, b` that the function around assigns; it only reads others."""
    stored = stored_names([function_around(node, source)])
    return [key for key in node.names if key in stored]


def function_around(node: ast.stmt, source: ModuleSource) -> ast.FunctionDef | ast.Module:
    """Return the innermost function of a file that a statement is in; the file where it is none of
    its own.
    """
    around = [
        item
        for item in ast.walk(source.tree)
        if isinstance(item, ast.FunctionDef)
        and item.lineno <= node.lineno <= (item.end_lineno or 0)
    ]
    return max(around, key=lambda item: item.lineno, default=source.tree)


def only_says(node: ast.If, frame: Frame) -> bool:
    """Whether a constructor of repositories' code does nothing in a branch but say something: what
    it assigns there, nothing else reads.
    """
    if frame.kind != "init" or not frame.translator.specialised:
        return False
    inner = {id(item) for item in ast.walk(node)}
    if not all(isinstance(item, _OF_MESSAGES) for item in ast.walk(node)):
        return False
    if any(isinstance(item, ast.Attribute) and _stores(item) for item in ast.walk(node)):
        return False
    stored = {item.id for item in ast.walk(node) if isinstance(item, ast.Name) and _stores(item)}
    calls = [item for item in ast.walk(node) if isinstance(item, ast.Expr)]
    said = calls and all(ast.unparse(item).startswith(SAYING) for item in calls)
    outer = [
        item
        for item in ast.walk(function_around(node, frame.source))
        if isinstance(item, ast.Name) and id(item) not in inner and not _stores(item)
    ]
    later = {item.id for item in outer if item.lineno > node.lineno}
    return bool(said) and not stored & later


def says(expr: ast.expr, frame: Frame) -> bool:
    """Whether a statement is a constant, or calls a function of the repository's which prints at
    most.
    """
    match expr:
        case ast.Constant():
            return True
        case ast.Call(func=ast.Name(id=key)) if frame.translator.specialised:
            function = frame.source.functions.get(key) if key not in frame.env.values else None
            lines = [] if function is None else [*map(_lines, function.body)]
            return bool(lines) and all(ast.unparse(x).startswith(SAYING) for x in sum(lines, []))
    return False


def _lines(statement: ast.stmt) -> list[ast.stmt]:
    """Return a statement, or those that stand under its condition."""
    if not isinstance(statement, ast.If):
        return [statement]
    return [line for item in (*statement.body, *statement.orelse) for line in _lines(item)]


def _stores(node: ast.Name | ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)


def _nothing_yet(key: str, node: ast.Global, source: ModuleSource) -> ast.expr:
    made = [
        item.value
        for item in source.tree.body
        if isinstance(item, ast.Assign | ast.AnnAssign)
        for target in (item.targets if isinstance(item, ast.Assign) else [item.target])
        if isinstance(target, ast.Name) and target.id == key
    ]
    match made:
        case [ast.Constant(value=None) as nothing]:
            return nothing
    raise Untranslatable(f"the global {key}, assigned at {source.location(node)}")
