"""Functions that are run where they are called: those defined inside others, and helpers of
constructors.

What is left of a body is written into the caller; its variables get names that are free there.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TypeGuard

from torch import nn

from onboard.analysis.source import ModuleSource, module_source
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.env import Env
from onboard.codegen.translate.language.frame import GIVEN, Frame
from onboard.codegen.translate.language.handed import changes, variables
from onboard.codegen.translate.language.object_values import Closure, Instance, Self
from onboard.codegen.translate.language.program.argument_facts import (
    bind,
    receiver,
    stores_attributes,
)
from onboard.codegen.translate.language.program.inline import defaults
from onboard.codegen.translate.language.program.plain_functions import or_as_it_is
from onboard.codegen.translate.language.statements.bindings import first_values
from onboard.codegen.translate.language.statements.execute import execute
from onboard.codegen.translate.language.statements.loops.turns import RETURNS
from onboard.codegen.translate.language.trees.skips import chosen, without_returns
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.language.values import NONE, Code, Mapping, Value

_FUNCTIONS = (ast.FunctionDef, ast.Lambda)


def call_closure(closure: Closure, args: Args, frame: Frame) -> Value:
    """Return what a function gives that is defined inside another one."""
    if closure.home is frame:
        seen = closure.seen | frame.env.values
    else:
        _check_unchanged(closure, frame)
        seen = closure.seen | {closure.node.name: closure}
    inside = partial(run_inside, closure.node, closure.source, args, frame, seen)
    around = seen.keys() - {closure.node.name}
    return or_as_it_is(inside, closure.node, closure.source, args, frame, around)


def _check_unchanged(closure: Closure, frame: Frame) -> None:
    """Raise `Untranslatable` where a function that is called elsewhere than where it is defined reads
    variables around it that hold something else by now, or assigns them.
    """
    if closure.home is not None and (assigned := _of_around(closure.node)):
        raise Untranslatable(f"{closure.node.name}, which assigns {min(assigned)} around it")
    read = {item.id for item in ast.walk(closure.node) if isinstance(item, ast.Name)}
    for key in read & closure.seen.keys() & frame.env.values.keys():
        now = frame.env.values[key]
        if closure.source is frame.source and not now.equals(closure.seen[key]):
            raise Untranslatable(f"{closure.node.name}, which reads {key}, which changes")


def run_method(owner: type, node: ast.FunctionDef, args: Args, frame: Frame) -> Value | None:
    """Return the result of a method of repositories' code that a constructor calls, that makes
    attributes in a forward, or that picks a module, run where it is called; None for others.
    """
    makes, picks = (
        frame.kind == "init",
        len(node.body) == 1 and isinstance(node.body[0], ast.Return),
    )
    if frame.kind == "function" or not frame.translator.specialised:
        return None
    if not (makes or picks or stores_attributes(node)):
        return None
    source, emitted = module_source(owner.__module__), len(frame.out)
    static = "staticmethod" in {ast.unparse(item) for item in node.decorator_list}
    value: Value | None = None
    try:
        value = run_inside(node, source, args, frame, receiver(node), method=not static)
    except Untranslatable:
        if not (makes or picks):
            raise
    if not isinstance(value, Instance) and (picks and not makes or value is None):
        del frame.out[emitted:]
        return None
    return value


def or_inside(
    called: Callable[[ast.FunctionDef, ModuleSource, Args], Value],
    node: ast.FunctionDef,
    source: ModuleSource,
    args: Args,
    frame: Frame,
) -> Value:
    """Return the result of a helper; one that is another one for each config is run where it is
    called.
    """
    try:
        return called(node, source, args)
    except Untranslatable as error:
        emitted = len(frame.out)
        try:
            return run_inside(node, source, args, frame)
        except Untranslatable as other:
            del frame.out[emitted:]
            raise other from error


def is_known_when_made(args: Args) -> bool:
    """Whether what a helper of a constructor is given is static, or has modules."""
    return args.static() or any(isinstance(each, Self | Instance) for each in args.positional)


def in_constructor(
    called: Callable[[ast.FunctionDef, ModuleSource, Args], Value],
    node: ast.FunctionDef,
    source: ModuleSource,
    args: Args,
    frame: Frame,
) -> Value:
    """Return the result of a helper of a constructor; one that gives a class is run where it is
    called, for generated code has no classes as values, and so is one that makes a module of one of
    several, for what reads it has to know which.
    """
    classes = frame.translator.specialised and _is_of_classes(node, source)
    return (inside_or if classes else or_inside)(called, node, source, args, frame)


def _is_of_classes(node: ast.FunctionDef, source: ModuleSource) -> bool:
    """Whether what a helper returns is known where it is made alone: classes, modules, settings."""
    return any(each(node, source) for each in (_gives_classes, _makes_modules, makes_settings))


def makes_settings(node: ast.FunctionDef, source: ModuleSource) -> bool:
    """Whether a helper returns objects that keep what they are given."""
    given = [item.value for item in ast.walk(node) if isinstance(item, ast.Return)]
    calls = [item.func for item in given if isinstance(item, ast.Call)]
    made = [_classes(item, node, source) for item in calls]
    kept = (
        cls is SimpleNamespace or dataclasses.is_dataclass(cls) for each in made for cls in each
    )
    return bool(given) and len(calls) == len(given) and all(made) and all(kept)


def _gives_classes(node: ast.FunctionDef, source: ModuleSource) -> bool:
    """Whether a helper returns classes, one or another, by their names or out of tables of them."""
    given = [item.value for item in ast.walk(node) if isinstance(item, ast.Return)]
    return bool(given) and all(item is not None and _classes(item, node, source) for item in given)


def _makes_modules(node: ast.FunctionDef, source: ModuleSource) -> bool:
    """Whether a helper returns modules of several classes, each made where it returns it, or of a
    class out of a table.
    """
    given = [item.value for item in ast.walk(node) if isinstance(item, ast.Return)]
    made = [item.func for item in given if isinstance(item, ast.Call)]
    classes = [_classes(item, node, source) for item in made]
    several = {each for found in classes for each in found}
    tabled = any(not isinstance(_named(item, source), type) for item in made)
    modules = all(issubclass(each, nn.Module) for each in several) and all(classes)
    return modules and len(made) == len(given) and (tabled or len(several) > 1)


def _classes(
    node: ast.expr, function: ast.FunctionDef, source: ModuleSource, seen: tuple[str, ...] = ()
) -> list[type]:
    """Return the classes that an expression of a function stands for, one or another: by their names,
    or those in tables of the module, or in some that it writes down itself.
    """
    parts: list[ast.expr] = []
    match node:
        case ast.Name(id=key) if key not in seen and (
            assigned := [item.value for item in ast.walk(function) if _assigns(item, key)]
        ):
            seen, parts = (*seen, key), assigned
        case ast.Name() | ast.Attribute():
            found = _named(node, source)
            entries = [*found.values()] if isinstance(found, dict) else [found]
            return [each for each in entries if isinstance(each, type)]
        case ast.Call(func=ast.Attribute(value=table, attr="get"), args=[_, *others]):
            parts = [table, *others]
        case ast.Subscript(value=table):
            parts = [table]
        case ast.Dict(values=parts):
            pass
    return [each for part in parts for each in _classes(part, function, source, seen)]


def _assigns(node: ast.AST, key: str) -> TypeGuard[ast.Assign]:
    return isinstance(node, ast.Assign) and [ast.unparse(x) for x in node.targets] == [key]


def _named(node: ast.expr, source: ModuleSource) -> object:
    """Return what a name of a module stands for, or an attribute of that; None for other code."""
    match node:
        case ast.Name(id=key):
            return source.namespace.get(key)
        case ast.Attribute(value=owner, attr=attr):
            return getattr(_named(owner, source), attr, None)
    return None


def inside_or(
    called: Callable[[ast.FunctionDef, ModuleSource, Args], Value],
    node: ast.FunctionDef,
    source: ModuleSource,
    args: Args,
    frame: Frame,
) -> Value:
    """Return the result of a helper that is another one for each config, run where it is called;
    where that does not work, a call of it.
    """
    emitted = len(frame.out)
    try:
        return run_inside(node, source, args, frame)
    except Untranslatable:
        del frame.out[emitted:]
        return called(node, source, args)


def run_inside(
    node: ast.FunctionDef,
    source: ModuleSource,
    args: Args,
    frame: Frame,
    seen: dict[str, Value] | None = None,
    *,
    method: bool = False,
) -> Value:
    """Write what is left of a function's body into its caller's; return what it gives at its end.

    Raises:
        Untranslatable: it may end in several places.
    """
    bound, rest = bind(node, args, method=method)
    own = _own_names(node, frame)
    inside = _of_around(node)
    around = {
        key: value
        for key, value in (seen or {}).items()
        if key not in own and not key.startswith(GIVEN)
    }
    own_attributes = {k: v for k, v in frame.env.values.items() if k.startswith("self.")}
    inner = Frame(
        frame.translator,
        source,
        frame.kind,
        frame.cls,
        frame.owner,
        env=Env({**around, **own_attributes}),
        out=frame.out,
        caller=frame.caller,
        branches=frame.branches,
        remembers=frame.remembers,
        outer=frame.outer,
        loops=frame.loops,
        turns=frame.turns,
        layers=frame.layers,
        names=own,
    )
    given = defaults(node, inner) | {k: _once(k, v, node, frame) for k, v in bound.items()}
    if node.args.kwarg is not None:
        given[node.args.kwarg.arg] = Mapping(rest)
    inner.env.values.update({own.get(key, key): value for key, value in given.items()})
    held = changes.hold({**around, **given, **rest}, inner)
    body = [_Renamed(own).visit(statement) for statement in _own_body(node, source)]
    value = _returned(execute(body, inner), inner, node)
    changed = {k: v for k, v in inner.env.values.items() if k.startswith("self.") or k in inside}
    frame.env.values.update(changed)
    for key, before in held.items():
        variables.note(before, [path[1:] for path in inner.changed if path[0] == key], frame)
        if (now := inner.env.values[f"{GIVEN}{key}"]) is not before:
            changes.replaced(before, now, frame)
    return value


def _once(parameter: str, value: Value, node: ast.FunctionDef, frame: Frame) -> Value:
    """Return an argument for a body that reads it several times: what a call computes for it stands
    in a variable.
    """
    read = [item for item in ast.walk(node) if isinstance(item, ast.Name) and item.id == parameter]
    if type(value) is not Code or value.static or len(read) < 2 or not _computes(value.expr):
        return value
    variable = frame.fresh(parameter)
    frame.bind(variable, value, node)
    return frame.env.values[variable]


def modules_called_once(node: ast.FunctionDef, args: Args, frame: Frame) -> Args:
    """Return the arguments of a helper with variables for what modules compute for it: written in its
    place, it may read them several times.
    """
    called = [
        isinstance(item, Code) and any(map(_is_of_self, ast.walk(item.expr)))
        for item in args.positional
    ]
    if args.stars or len(called) > len(node.args.args):
        return args
    given = [
        _once(parameter.arg, item, node, frame) if has_call else item
        for parameter, item, has_call in zip(node.args.args, args.positional, called, strict=False)
    ]
    return replace(args, positional=given)


def _is_of_self(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"))):
            return True
    return False


def _computes(expr: ast.expr) -> bool:
    return any(isinstance(item, ast.Call) for item in ast.walk(expr))


def _own_body(node: ast.FunctionDef, source: ModuleSource) -> list[ast.stmt]:
    """Return a copy of a function's statements, in which the module's names that it assigns are its
    own.
    """
    body = deepcopy(node.body)
    if _is_of_classes(node, source) and (value := chosen(body)) is not None:
        return [ast.copy_location(ast.Return(value), node)]
    return [
        statement
        for item in without_returns(body)
        for statement in (first_values(item, source) if isinstance(item, ast.Global) else [item])
    ]


def _returned(ending: str, inner: Frame, node: ast.FunctionDef) -> Value:
    """Take the return statement away that a body ends with."""
    if ending != RETURNS and not inner.returns:
        return NONE
    if (
        ending != RETURNS
        or len(inner.returns) != 1
        or not inner.out
        or inner.out[-1] is not inner.returns[0][0]
    ):
        raise Untranslatable(f"{node.name}, which returns in several places")
    inner.out.pop()
    return inner.settle(inner.returns[0][1])


def _own_variables(node: ast.FunctionDef | ast.Lambda) -> set[str]:
    """Return the variables of its own that a function assigns."""
    return _stored(node) - _of_around(node)


def _of_around(node: ast.AST) -> set[str]:
    """Return the variables of functions around it that a function assigns (`nonlocal`), by itself or
    in functions inside it.
    """
    named = (
        {name for item in node.body if isinstance(item, ast.Nonlocal) for name in item.names}
        if isinstance(node, ast.FunctionDef)
        else set()
    )
    inside = [each for item in ast.iter_child_nodes(node) for each in _functions(item)]
    return named | set().union(*map(_of_around, inside)) - (_stored(node) - named)


def _functions(node: ast.AST) -> list[ast.AST]:
    """Return the outermost functions that a node is or has."""
    if isinstance(node, _FUNCTIONS):
        return [node]
    return [each for item in ast.iter_child_nodes(node) for each in _functions(item)]


def _stored(node: ast.AST) -> set[str]:
    """Return the variables that a function assigns, those of functions inside it left out."""
    inside = [item for item in ast.iter_child_nodes(node) if not isinstance(item, _FUNCTIONS)]
    own = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    return ({node.id} if own else set()).union(*map(_stored, inside))  # type: ignore[attr-defined]


def _own_names(node: ast.FunctionDef, frame: Frame) -> dict[str, str]:
    """Return free names for the variables that a function assigns."""
    stored = _own_variables(node)
    taken = frame.env.values.keys() | {
        item.id
        for statements in (frame.out, *frame.outer)
        for statement in statements
        for item in ast.walk(statement)
        if isinstance(item, ast.Name)
    }
    names: dict[str, str] = {}
    for key in sorted(stored):
        number = 1
        names[key] = key
        while names[key] in taken:
            names[key] = f"{key}_{number}"
            number += 1
    return names


class _Renamed(ast.NodeTransformer):
    """Gives variables other names."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        """Rename it."""
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.Nonlocal:
        """Rename them where a function inside assigns them."""
        node.names = [self.names.get(key, key) for key in node.names]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Rename what a function inside reads of the one around it."""
        own = _own_variables(node) | {
            item.arg for item in ast.walk(node.args) if isinstance(item, ast.arg)
        }
        inner = _Renamed({key: new for key, new in self.names.items() if key not in own})
        node.body = [inner.visit(item) for item in node.body]
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        """Rename likewise."""
        own = {item.arg for item in ast.walk(node.args) if isinstance(item, ast.arg)}
        inner = _Renamed({key: new for key, new in self.names.items() if key not in own})
        node.body = inner.visit(node.body)
        return node
