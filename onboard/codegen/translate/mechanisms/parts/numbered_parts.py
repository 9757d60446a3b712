"""Modules under names that a constructor numbers: `setattr(self, f"expert_{i}", Expert(config))`.

A class has one attribute for all of them, by the name with a hole: `expert_{}`. Model files add them with
`add_module`, and find them with `get_submodule`.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import (
    Instance,
    ModuleList,
    Self,
    joined_ways,
)
from onboard.codegen.translate.language.statements.assignments.own_attributes import store_attribute
from onboard.codegen.translate.language.trees.syntax import attribute, call, name
from onboard.codegen.translate.language.values import NONE, Known, Value

_HOLE = "{}"
_ADDS = ("add_module", "register_module")
_TABLE = "_modules"


class NumberedParts(Mechanism):
    """`setattr(self, f"expert_{i}", ...)`, `add_module`, and `getattr(self, f"expert_{i}")`."""

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """`setattr` and `getattr` of the module itself."""
        if not frame.translator.specialised:
            return None
        match args.positional:
            case [Self(), key, made] if function is setattr and frame.kind == "init":
                return _added(key, made, frame)
            case [Self(), key] if function is getattr:
                return _found(key, frame)
        return None

    def call_own_method(self, attr: str, args: Args, frame: Frame) -> Value | None:
        """`self.add_module(key, made)`, `self.get_submodule(key)`."""
        if not frame.translator.specialised:
            return None
        match args.positional:
            case [key, made] if attr in _ADDS and frame.kind == "init":
                return _added(key, made, frame)
            case [key] if attr == "get_submodule":
                return _found(key, frame)
        return None

    def item(self, owner: Value, index: Value, node: ast.Subscript, frame: Frame) -> Value | None:
        """`self._modules[key]`."""
        of_self = isinstance(node.value, ast.Attribute) and node.value.attr == _TABLE
        if of_self and ast.unparse(node.value) == f"self.{_TABLE}":
            return _found(index, frame)
        return None


def _added(key: Value, made: Value, frame: Frame) -> Value | None:
    if isinstance(key, Known) and isinstance(key.value, str):
        store_attribute(key.value, made, frame, None)
        return NONE
    text = _formatted(key.code(), frame)
    if text is None or not isinstance(made, Instance):
        return None
    frame.emit(ast.Expr(call(attribute(name("self"), _ADDS[0]), text, made.code())))
    place = f"self.{_with_holes(text)}"
    for env in (*frame.loops, frame.env):
        before = env.values.get(place)
        ways = before.made if isinstance(before, Instance) else ()
        env.values[place] = replace(made, made=joined_ways(ways, made.made), expr=name("_"))
    return NONE


def _found(key: Value, frame: Frame) -> Value | None:
    """Return the module of a name; None where there is none of such a name, or of one of several."""
    own = {} if frame.cls is None else frame.cls.attributes
    numbered = [each for each in own if _HOLE in each]
    if not numbered or isinstance(key, Known):
        return None
    text = _formatted(key.code(), frame)
    alike = [each for each in numbered if text is None or each == _with_holes(text)]
    if len(alike) != 1 or not isinstance(made := own[alike[0]], Instance):
        return None
    path = call(attribute(name("self"), "get_submodule"), key.code() if text is None else text)
    return replace(made, expr=path)


def modules_numbered(prefix: str, frame: Frame) -> ModuleList | None:
    """Return the module's own modules whose names go on with a number, in a variable; None where
    there are none.
    """
    own = {} if frame.cls is None else frame.cls.attributes
    keys = [key for key in own if key == prefix + _HOLE or key.removeprefix(prefix).isdigit()]
    parts = [own[key] for key in keys]
    made = tuple(each for part in parts if isinstance(part, Instance) for each in part.made)
    if not made:
        return None
    for key in keys:
        if _HOLE not in key:
            frame.evaluate(attribute(name("self"), key))  # which is read
    text = (
        f"[child for key, child in self.named_children() if key.removeprefix({prefix!r}).isdigit()]"
    )
    variable = frame.fresh("experts")
    frame.emit(ast.Assign([name(variable, store=True)], ast.parse(text, mode="eval").body))
    return ModuleList(joined_ways(made[:1], made[1:]), name(variable))


def _formatted(node: ast.expr, frame: Frame) -> ast.JoinedStr | None:
    """Return a text with one number in it: an f-string, however it is written."""
    parts: list[ast.expr] = []
    match node:
        case ast.JoinedStr():
            return node if _with_holes(node).count(_HOLE) == 1 else None
        case ast.BinOp(left=ast.Constant(value=str() as text), op=ast.Mod(), right=number):
            number = number.elts[0] if isinstance(number, ast.Tuple) else number
            return _of_halves(text.split("%d" if "%d" in text else "%s"), number)
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str() as text), attr="format"),
            args=[number],
        ):
            return _of_halves(text.split(_HOLE), number)
        case ast.BinOp(op=ast.Add()):
            parts = _terms(node)
        case ast.Name(id=key):
            for statement in reversed(
                [each for body in (*frame.outer, frame.out) for each in body]
            ):
                match statement:
                    case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == key:
                        return None if isinstance(value, ast.Name) else _formatted(value, frame)
    numbers = [each for each in parts if not _is_text(each)]
    match numbers:
        case [ast.Call(func=ast.Name(id="str"), args=[number])]:
            texts = ["".join(_text(each) for each in side) for side in _sides(parts, numbers[0])]
            return _of_halves(texts, number)
    return None


def _of_halves(halves: list[str], number: ast.expr) -> ast.JoinedStr | None:
    if len(halves) != 2:
        return None
    hole = ast.FormattedValue(number, -1)
    texts = [ast.Constant(half) if half else None for half in halves]
    return ast.JoinedStr([each for each in (texts[0], hole, texts[1]) if each is not None])


def _terms(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_terms(node.left), *_terms(node.right)]
    return [node]


def _sides(parts: list[ast.expr], middle: ast.expr) -> tuple[list[ast.expr], list[ast.expr]]:
    place = parts.index(middle)
    return parts[:place], parts[place + 1 :]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _text(node: ast.expr) -> str:
    assert isinstance(node, ast.Constant)
    return str(node.value)


def _with_holes(text: ast.JoinedStr) -> str:
    return "".join(_text(part) if _is_text(part) else _HOLE for part in text.values)
