"""Lists and dicts that a function is given, or that are fields of objects: a change makes another one,
which is then where that one was.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from onboard.codegen.translate.language.forms import DICT, LIST
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.handed import variables
from onboard.codegen.translate.language.handed.by_name import ByName, Output
from onboard.codegen.translate.language.handed.left_in_arguments import Left
from onboard.codegen.translate.language.trees.syntax import Untranslatable, with_place
from onboard.codegen.translate.language.values import Code, Items, Known, Mapping, Unread, Value

_Grow = Callable[[Value, Value, bool], Value]
_OTHERS = ("insert", "pop", "remove", "clear", "setdefault", "popitem", "reverse", "sort")


@dataclass(frozen=True)
class _Place:
    """Where a list or a dict is, or what lies in one."""

    value: Value
    put: Callable[[Value], None]


def calls_method(node: ast.expr, frame: Frame) -> bool:
    """Execute `place.append(item)`, `extend` and `update`; return whether it was one of such a place.

    Raises:
        Untranslatable: it is another method that changes a list or a dict.
    """
    match node:
        case ast.Call(
            func=ast.Attribute(value=target, attr=attr), args=items, keywords=entries
        ) if attr in (*_GROWING, *_OTHERS):
            place = _place(target, frame, node)
        case _:
            return False
    if place is None or not _is_container(place.value) and attr not in _OF_LISTS:
        return False
    if attr in _OTHERS or len(items) != 1 or entries:
        raise Untranslatable(f"{ast.unparse(node.func)}(...) of what others have, too")
    place.put(_grown(place.value, _GROWING[attr], items[0], frame))
    return True


def _grown(known: Value, grow: _Grow, node: ast.expr, frame: Frame) -> Value:
    """Return a list or a dict with more in it; of what has no translation nothing may read it."""
    try:
        return grow(known, frame.settle(frame.evaluate(node)), bool(frame.loops))
    except Untranslatable as error:
        return Unread(with_place(error, str(error)))


def stores_item(target: ast.Subscript, value: Value, frame: Frame, origin: ast.AST) -> bool:
    """Put an item into a list or a dict; return whether it was in such a place."""
    place = _place(target.value, frame, origin)
    if place is None or isinstance(place.value, ByName):
        return False
    key = frame.evaluate(target.slice)
    text = isinstance(key, Known) and isinstance(key.value, str)
    if not _is_container(place.value) and not text:
        return False  # a tensor, which is worked on in place
    place.put(_with_item(place.value, key, value))
    return True


def adds(node: ast.AugAssign, operand: Value, frame: Frame) -> bool:
    """Execute `place += items` of a list; return whether it was one."""
    place = _place(node.target, frame, node) if isinstance(node.op, ast.Add) else None
    if place is None or not (isinstance(operand, Items) or _is_list(operand)):
        return False
    if not _is_list(place.value):
        return False
    place.put(_extended(place.value, operand, bool(frame.loops)))
    return True


def _place(target: ast.expr, frame: Frame, origin: ast.AST) -> _Place | None:
    match target:
        case ast.Name(id=variable):
            value = frame.env.values.get(variable)
            if value is None or not variables.places_of(value, variables.held(frame)):
                return None
            return _Place(value, partial(variables.rebind, value, frame=frame, origin=origin))
        case ast.Attribute(value=ast.Name() | ast.Attribute() as owner, attr=attr):
            whole = frame.evaluate(owner)
            if not isinstance(whole, Output) or attr not in whole.entries:
                return None
            named = owner.id if isinstance(owner, ast.Name) else ""

            def put(new: Value) -> None:
                variables.put(whole, attr, new, frame, named, origin)

            return _Place(whole.entries[attr], put)
        case ast.Subscript(value=owner, slice=index):
            outer = _place(owner, frame, origin)
            if outer is None or isinstance(outer.value, ByName):
                return None
            key = frame.evaluate(index)
            item = _item(outer.value, key)
            return _Place(item, lambda new: outer.put(_with_item(outer.value, key, new)))
    return None


def _is_list(value: Value) -> bool:
    if isinstance(value, Code):
        return value.form == LIST
    return isinstance(value, Left) or isinstance(value, Items) and value.kind == LIST


def _is_container(value: Value) -> bool:
    dict_there = isinstance(value, Mapping) or isinstance(value, Code) and value.form == DICT
    return dict_there or _is_list(value)


def _appended(known: Value, item: Value, loops: bool) -> Value:
    return _extended(known, Items((item,), kind=LIST), loops)


def _extended(known: Value, items: Value, loops: bool) -> Value:
    """Return a list with more items; in a loop it has any length."""
    if isinstance(known, Left):
        return known
    if isinstance(known, Items) and isinstance(items, Items) and not loops:
        return Items((*known.items, *items.items), kind=LIST)
    parts = [part for each in (known, items) for part in _unpacked(each)]
    return Code(ast.List(parts, ast.Load()), form=LIST)


def _unpacked(value: Value) -> list[ast.expr]:
    if isinstance(value, Items):
        return [item.code() for item in value.items]
    return [ast.Starred(value.code(), ast.Load())]


def _updated(known: Value, items: Value, loops: bool) -> Value:
    """Return a dict with other entries."""
    if isinstance(known, Left):
        return known
    if isinstance(known, Mapping) and isinstance(items, Mapping):
        return Mapping({**known.items, **items.items})
    return Code(ast.Dict([None, None], [known.code(), items.code()]), form=DICT)


def _item(owner: Value, key: Value) -> Value:
    match owner, key:
        case Left(), _:
            return owner
        case Mapping(items=entries), Known(value=str() as text) if text in entries:
            return entries[text]
        case Items(items=items), Known(value=int() as place) if -len(items) <= place < len(items):
            return items[place]
    return Code(ast.Subscript(owner.code(), key.code(), ast.Load()))


def _with_item(owner: Value, key: Value, value: Value) -> Value:
    """Return a list or a dict with another item."""
    match owner, key:
        case Left(), _:
            return owner
        case Mapping(items=entries), Known(value=str() as text):
            return Mapping({**entries, text: value})
        case Items(items=items), Known(value=int() as place) if -len(items) <= place < len(items):
            changed = list(items)
            changed[place] = value
            return Items((*changed,), kind=LIST)
    if _is_list(owner):
        return _with_place(owner, key, value)
    if isinstance(owner, Mapping):
        keys: list[ast.expr | None] = [ast.Constant(each) for each in owner.items]
        codes = [each.code() for each in owner.items.values()]
        return Code(ast.Dict([*keys, key.code()], [*codes, value.code()]), form=DICT)
    return Code(ast.Dict([None, key.code()], [owner.code(), value.code()]), form=DICT)


def _with_place(owner: Value, key: Value, value: Value) -> Code:
    """Return `[*owner[:i], value, *owner[i + 1:]]`."""
    whole, place = owner.code(), key.code()
    behind: ast.expr | None = ast.BinOp(place, ast.Add(), ast.Constant(1))
    if isinstance(key, Known):
        behind = ast.Constant(key.value + 1) if key.value != -1 else None
    before = ast.Subscript(whole, ast.Slice(None, place), ast.Load())
    parts: list[ast.expr] = [ast.Starred(before, ast.Load()), value.code()]
    if behind is not None:
        after = ast.Subscript(whole, ast.Slice(behind, None), ast.Load())
        parts.append(ast.Starred(after, ast.Load()))
    return Code(ast.List(parts, ast.Load()), form=LIST)


_OF_LISTS: dict[str, _Grow] = {"append": _appended, "extend": _extended}
_GROWING: dict[str, _Grow] = {**_OF_LISTS, "update": _updated}
