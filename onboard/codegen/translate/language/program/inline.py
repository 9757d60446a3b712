"""Functions that come down to an expression, and are written where they are called."""

from __future__ import annotations

import ast

from onboard.analysis.source import ModuleSource, find_method, module_source
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame, Program
from onboard.codegen.translate.language.handed.by_name import shared
from onboard.codegen.translate.language.program.argument_facts import (
    as_parameters,
    bind,
    default_nodes,
)
from onboard.codegen.translate.language.state import ClassState
from onboard.codegen.translate.language.statements.execute import execute
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.language.values import NONE, Items, Known, Mapping, Unread, Value


def call_autograd(translator: Program, cls: type, args: Args, frame: Frame) -> Value:
    """Return `cls.apply(...)` of a function with a derivative of its own: what its forward
    computes.
    """
    found = find_method(cls, "forward")
    if found is None:
        raise Untranslatable(f"{cls.__name__}.apply")
    # No context to save anything in
    given = Args([NONE, *args.positional], args.keywords, args.stars)
    result = inline(
        translator, found[1], module_source(found[0].__module__), given, frame.cls or frame.caller
    )
    if result is None:
        raise Untranslatable(f"{cls.__name__}.forward")
    return result


def inline(
    translator: Program,
    node: ast.FunctionDef,
    source: ModuleSource,
    args: Args,
    caller: ClassState | None,
) -> Value | None:
    """Return what a function gives where that comes down to an expression."""
    bound, rest = bind(node, args, method=False)
    inner = Frame(translator, source, "function", caller=caller)
    handed = {key: shared(item) for key, item in (bound | rest).items()}
    inner.env.values.update(defaults(node, inner) | handed)
    if node.args.kwarg is not None:
        inner.env.values[node.args.kwarg.arg] = Mapping(dict(rest))
    try:
        execute(node.body, inner)
    except Untranslatable:
        return None
    others = [statement for statement in inner.out if not isinstance(statement, ast.Return)]
    if others or len(inner.returns) != 1 or isinstance(given := inner.returns[0][1], Unread):
        return None
    return given


def defaults(node: ast.FunctionDef, frame: Frame) -> dict[str, Value]:
    """Return the values of the parameters that have a default."""
    return {key: frame.evaluate(item) for key, item in default_nodes(node).items()}


def with_rest(node: ast.FunctionDef, facts: dict[str, Value]) -> dict[str, Value]:
    """Return a constructor's `*args`, which nothing passes, and `**kwargs` where every use gives the
    same keywords.
    """
    named = {item.arg for item in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
    rest = {key: fact for key, fact in facts.items() if key not in named}
    given: dict[str, Value] = {}
    if node.args.vararg is not None:
        given[node.args.vararg.arg] = Items(())
    if node.args.kwarg is not None and all(map(_is_passed, rest.values())):
        given[node.args.kwarg.arg] = Mapping(as_parameters(rest))
    return given


def _is_passed(fact: Value) -> bool:
    """Whether all uses pass a setting: what one of them leaves out may be None."""
    return isinstance(fact, Known) or (fact.is_static and not fact.may_be_none)
