"""Lists and dicts that a function is given, or that are fields of objects: a change makes another one,
which is then where that one was.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.handed import container_values as values
from onboard.codegen.translate.language.handed import variables
from onboard.codegen.translate.language.handed.by_name import ByName, Output
from onboard.codegen.translate.language.trees.syntax import Untranslatable, with_place
from onboard.codegen.translate.language.values import Code, Items, Known, Mapping, Unread, Value

_GROWING: dict[str, values.Grow] = {
    "append": values.appended,
    "extend": values.extended,
    "update": values.updated,
}
_OTHERS = ("insert", "pop", "remove", "clear", "setdefault", "popitem", "reverse", "sort")
_LONG = 32


@dataclass(frozen=True)
class _Place:
    """Where a list or a dict is, or what lies in one."""

    value: Value
    put: Callable[[Value], None]


def calls_method(node: ast.expr, frame: Frame) -> bool:
    """Execute `place.append(item)` and what else changes a list or a dict; return whether it was one of
    such a place.

    Raises:
        Untranslatable: what the method does depends on what the items are.
    """
    match node:
        case ast.Call(func=ast.Attribute(value=target, attr=attr)) if attr in _GROWING:
            place = _place(target, frame, node, own=attr != "append")
        case ast.Call(func=ast.Attribute(attr=attr)) if attr in _OTHERS:
            return gives(node, frame, used=False) is not None
        case _:
            return False
    if place is None or not _is_container(place.value) and attr == "update":
        return False
    place.put(_grown(place.value, node, frame))
    return True


def _grown(known: Value, node: ast.Call, frame: Frame) -> Value:
    """Return a list or a dict with more in it; of what has no translation nothing may read it."""
    assert isinstance(node.func, ast.Attribute)
    grow = _GROWING[node.func.attr]

    def with_more(known: Value, more: Value) -> Value:
        if isinstance(known, Items | Mapping) and not frame.loops:
            more = named(_stem(known, node), more, frame, node)
        return grow(known, more, bool(frame.loops))

    try:
        for item in node.args:
            known = with_more(known, frame.settle(frame.evaluate(item)))
        words = {each.arg: frame.settle(frame.evaluate(each.value)) for each in node.keywords}
        if None in words:
            raise Untranslatable(f"** in {ast.unparse(node)}")
        more = Mapping({str(key): item for key, item in words.items()})
        return with_more(known, more) if words else known
    except Untranslatable as error:
        return Unread(with_place(error, str(error)))


def _stem(known: Items | Mapping, call: ast.Call) -> str:
    """Return a name for what a method adds to a list or a dict."""
    assert isinstance(call.func, ast.Attribute)
    place = call.func.value
    added = len(known.items) if call.func.attr == "append" else ""
    return entry_name(place, added)


def named(stem: str, value: Value, frame: Frame, origin: ast.AST) -> Value:
    """Return what a forward of repositories' code puts into a list or a dict, by variables' names where
    it is computed: what reads it more than once must not compute it again.
    """
    if frame.kind != "forward" or not frame.translator.specialised:
        return value
    match value:
        case Items(items=items):
            parts = [named(f"{stem}_{i}", each, frame, origin) for i, each in enumerate(items)]
            return replace(value, items=(*parts,))
        case Mapping(items=entries):
            return Mapping({k: named(f"{stem}_{k}", v, frame, origin) for k, v in entries.items()})
        case Code(is_static=False) if _computes(value.expr):
            variable = frame.fresh(stem)
            frame.bind(variable, value, origin)
            return frame.env.values[variable]
    return value


def _computes(expr: ast.expr) -> bool:
    return any(isinstance(node, ast.Call) for node in ast.walk(expr))


def entry_name(place: ast.expr, key: object) -> str:
    """Return a variable's name for an entry of a list or a dict, after both."""
    text = f"{ast.unparse(place)}_{key}".removeprefix("self.")
    both = re.sub(r"[\W_]+", "_", text).strip("_")
    return both if both.isidentifier() and len(both) < _LONG else "entry"


def gives(node: ast.Call, frame: Frame, used: bool = True) -> Value | None:
    """Return what a call of `pop`, `setdefault` or the like gives that changes a list or a dict; None
    where it is not one of such a place.

    Args:
        used: somebody reads what it gives, which then has a name: what it is part of changes.

    Raises:
        Untranslatable: what the method does depends on what the items are.
    """
    match node:
        case ast.Call(func=ast.Attribute(value=target, attr=attr), args=items) if attr in _OTHERS:
            place = _place(target, frame, node, own=True)
        case _:
            return None
    if place is None or not _is_container(place.value):
        return None
    args = [frame.settle(frame.evaluate(item)) for item in items]
    changed, given = values.after(place.value, attr, args, bool(frame.loops))
    if _is_reversed(node, frame):
        changed, _ = values.after(changed, "reverse", [], bool(frame.loops))
    if used and isinstance(given, Code):
        item = frame.fresh("item")
        frame.bind(item, given, node)
        given = frame.env.values[item]
    place.put(changed)
    return given


def _is_reversed(node: ast.Call, frame: Frame) -> bool:
    """Whether a call sorts backwards.

    Raises:
        Untranslatable: it says something else by name.
    """
    words = {each.arg: frame.evaluate(each.value).truth() for each in node.keywords}
    reverse = words.pop("reverse", False)
    if words or reverse is None:
        raise Untranslatable(f"{ast.unparse(node)}, which depends on what the items are")
    return reverse


def deletes(node: ast.Delete, frame: Frame) -> None:
    """Execute `del place[key]` of lists and dicts; names that are deleted nothing reads."""
    for target in node.targets:
        if not isinstance(target, ast.Subscript) or not frame.translator.specialised:
            continue
        place = _place(target.value, frame, node, own=True)
        if place is not None and _is_container(place.value):
            key = frame.settle(frame.evaluate(target.slice))
            place.put(values.without_item(place.value, key, bool(frame.loops)))


def stores_item(target: ast.Subscript, value: Value, frame: Frame, origin: ast.AST) -> bool:
    """Put an item into a list or a dict; return whether it was in such a place."""
    key = frame.evaluate(target.slice)
    place = _place(target.value, frame, origin, own=isinstance(target.slice, ast.Slice))
    if place is None or isinstance(place.value, ByName):
        return False
    text = isinstance(key, Known) and isinstance(key.value, str)
    entry = text or isinstance(value, Mapping)
    if not _is_container(place.value) and not entry:
        return False  # a tensor, which is worked on in place
    one = isinstance(key, Known) and not isinstance(key.value, slice)
    if one and isinstance(place.value, Items | Mapping):
        value = named(entry_name(target.value, ast.unparse(key.code())), value, frame, origin)
    place.put(values.with_item(place.value, key, value))
    return True


def adds(node: ast.AugAssign, operand: Value, frame: Frame) -> bool:
    """Execute `place += items` of a list, or `place |= entries` of a dict; return whether it was one."""
    if not isinstance(node.op, ast.Add | ast.BitOr):
        return False
    place = _place(node.target, frame, node, own=not frame.loops)
    if place is None:
        return False
    alike, grow = (
        (values.is_list, values.extended)
        if isinstance(node.op, ast.Add)
        else (values.is_dict, values.updated)
    )
    if not alike(place.value) or not (isinstance(operand, Items) or alike(operand)):
        return False
    if isinstance(place.value, Items) and not frame.loops:
        operand = named(entry_name(node.target, "more"), operand, frame, node)
    place.put(grow(place.value, operand, bool(frame.loops)))
    return True


def _place(target: ast.expr, frame: Frame, origin: ast.AST, own: bool = False) -> _Place | None:
    """Return where something is that others have, too, or a list of the function's own; None for else.

    Args:
        own: lists and dicts of variables, too, that nobody else has.
    """
    match target:
        case ast.Name(id=variable):
            value = frame.env.values.get(variable)
            if value is None:
                return None
            kept = _is_container if frame.kind == "forward" else values.is_list
            is_own = own and frame.translator.specialised and kept(value)
            if not is_own and not variables.places_of(value, variables.held(frame)):
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
        case ast.Call(func=ast.Attribute(value=owner, attr="setdefault"), args=[index, *_]):
            if gives(target, frame) is None:
                return None
            return _place(ast.Subscript(owner, index, ast.Load()), frame, origin, own)
        case ast.Subscript(value=owner, slice=index):
            outer = _place(owner, frame, origin, own) or _own_dict(owner, frame, origin)
            if outer is None or isinstance(outer.value, ByName):
                return None
            key = frame.evaluate(index)
            item = values.item_of(outer.value, key)
            return _Place(item, lambda new: outer.put(values.with_item(outer.value, key, new)))
    return None


def _own_dict(target: ast.expr, frame: Frame, origin: ast.AST) -> _Place | None:
    """Return where a dict is that a variable of repositories' code has, with lists or dicts in it."""
    known = frame.env.values.get(target.id) if isinstance(target, ast.Name) else None
    if known is None or not frame.translator.specialised or not values.is_dict(known):
        return None
    return _Place(known, partial(variables.rebind, known, frame=frame, origin=origin))


def _is_container(value: Value) -> bool:
    return values.is_dict(value) or values.is_list(value)
