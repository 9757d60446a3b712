"""What the body of a loop changes of the variables before it."""

from __future__ import annotations

import ast

from onboard.codegen.translate.language.env import Env
from onboard.codegen.translate.language.forms import LIST
from onboard.codegen.translate.language.frame import GIVEN, Frame
from onboard.codegen.translate.language.handed import variables
from onboard.codegen.translate.language.handed.by_name import ByName
from onboard.codegen.translate.language.handed.left_in_arguments import Left
from onboard.codegen.translate.language.sequences import sequence_of_all
from onboard.codegen.translate.language.statements import lists
from onboard.codegen.translate.language.statements.bindings import function_around
from onboard.codegen.translate.language.values import Code, Items, Unread, Value


def filled_dicts(start: Env, end: Env) -> dict[str, Value]:
    """Return the dicts from before a loop of whose items its body tells something."""
    dicts = {
        key: value
        for key, value in end.values.items()
        if key in start.values and isinstance(value, Code)
    }
    return {key: value for key, value in dicts.items() if (value.form or "").startswith("dict of ")}


def changed(node: ast.For | ast.While, start: Env, frame: Frame) -> list[str]:
    """Return the variables from before a loop that mean something else after its body, once fields of
    objects are in the variables that carry them.
    """
    variables.carry(start, frame, node)
    end = frame.env
    targets = [node.target] if isinstance(node, ast.For) else []
    own = {item.id for each in targets for item in ast.walk(each) if isinstance(item, ast.Name)}
    shared = [key for key in start.values if key in end.values and key not in own]
    named = [start.values[key] for key in shared if key.isidentifier()]
    shared = [k for k in shared if not (k.startswith(GIVEN) and start.values[k] in named)]
    return [key for key in shared if not _means_the_same(start.values[key], end.values[key])]


def _means_the_same(before: Value, after: Value) -> bool:
    """Whether a variable is what it was, no less a list or a tuple, and there where it was."""
    there = before.may_be_none or not after.may_be_none
    same_kind = sequence_of_all((before, after)) == sequence_of_all((before,))
    return there and same_kind and before.equals(after)


def left(node: ast.For | ast.While, start: Env, end: Env, frame: Frame) -> dict[str, Value]:
    """Return the variables that a loop binds first, and that are read behind it: they are what its
    last turn has left.
    """
    first: dict[str, tuple[int, bool]] = {}
    nodes = list(ast.walk(function_around(node, frame.source)))
    added = {id(item.target) for item in nodes if isinstance(item, ast.AugAssign)}
    for item in nodes:
        if isinstance(item, ast.Name) and item.lineno > (node.end_lineno or node.lineno):
            stores = isinstance(item.ctx, ast.Store) and id(item) not in added
            use = (item.lineno, stores)  # a line reads before it stores
            first[item.id] = min(use, first.get(item.id, use))
    new = end.values.keys() - start.values.keys()
    return {key: end.values[key] for key in new if not first.get(key, (0, True))[1]}


def widen(key: str, end: Value, frame: Frame, node: ast.AST) -> None:
    """Have a variable be what the loop leaves in it, too, which is `end`: where that has no translation,
    neither has the variable, in the loop or behind it.
    """
    if isinstance(end, Unread | Left):
        frame.env.values[key] = end
        return
    value = frame.env.values[key]
    if isinstance(value, ByName) and variables.widened(key, value, end, frame, node):
        return
    form = sequence_of_all((value, end))
    code = lists.listed(value) if form == LIST and isinstance(value, Items) else value.code()
    optional = value.may_be_none or end.may_be_none
    counts = frame.kind == "init" or isinstance(node, ast.While)
    static = counts and value.is_static and end.is_static
    frame.bind(key, Code(code, static, form=form, optional=optional), node)


def taken_for_granted(frame: Frame) -> tuple[list[ast.expr], int]:
    """Return the guards of the class whose code is evaluated, and how many of its methods are
    translated.
    """
    return ([], 0) if frame.cls is None else (list(frame.cls.guards), len(frame.cls.methods))


def forget(before: tuple[list[ast.expr], int], frame: Frame) -> None:
    """Drop guards since `before`, of branches decided while a list was taken for empty, or a variable
    for what it is before the loop; methods keep what they need.
    """
    if frame.cls is not None and len(frame.cls.methods) == before[1]:
        frame.cls.guards[:] = before[0]
