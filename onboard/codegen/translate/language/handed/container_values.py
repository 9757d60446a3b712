"""Lists and dicts with other items: what a change makes of one, as a value of its own."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from onboard.codegen.translate.language.forms import DICT, LIST
from onboard.codegen.translate.language.handed.left_in_arguments import Left
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, call
from onboard.codegen.translate.language.values import (
    NONE,
    Code,
    Items,
    Known,
    Mapping,
    Unread,
    Value,
)

Grow = Callable[[Value, Value, bool], Value]
Changed = tuple[Value, Value]
"""What becomes of a list or a dict, and what the call gives that changes it."""
_LAST = Known(-1)


def is_list(value: Value) -> bool:
    """Whether a value is a list; what a function has left somewhere may be one."""
    if isinstance(value, Code):
        return value.form == LIST
    return isinstance(value, Left) or isinstance(value, Items) and value.kind == LIST


def is_dict(value: Value) -> bool:
    """Whether a value is a dict."""
    return isinstance(value, Mapping) or isinstance(value, Code) and value.form == DICT


def appended(known: Value, item: Value, loops: bool) -> Value:
    """Return a list with one more item; in a loop it has any length."""
    return extended(known, Items((item,), kind=LIST), loops)


def extended(known: Value, items: Value, loops: bool) -> Value:
    """Return a list with more items; in a loop it has any length."""
    if isinstance(known, Left):
        return known
    if isinstance(known, Items) and isinstance(items, Items) and not loops:
        return Items((*known.items, *items.items), kind=LIST)
    return _list_of(known, items)


def updated(known: Value, items: Value, loops: bool) -> Value:
    """Return a dict with other entries."""
    if isinstance(known, Left):
        return known
    if isinstance(known, Mapping) and isinstance(items, Mapping):
        return Mapping({**known.items, **items.items})
    return Code(ast.Dict([None, None], [known.code(), items.code()]), form=DICT)


def item_of(owner: Value, key: Value) -> Value:
    """Return an item of a list, or an entry of a dict."""
    match owner, key:
        case Left(), _:
            return owner
        case Mapping(items=entries), Known(value=str() as text) if text in entries:
            return entries[text]
        case Items(items=items), Known(value=int() as place) if -len(items) <= place < len(items):
            return items[place]
    return Code(ast.Subscript(owner.code(), key.code(), ast.Load()))


def with_item(owner: Value, key: Value, value: Value) -> Value:
    """Return a list or a dict with another item, or other items of a slice; a dict that exists at run
    time lacks one that has no translation.
    """
    if isinstance(value, Unread) and is_dict(owner) and not isinstance(owner, Mapping):
        return without_item(owner, key, False)
    if (bounds := _bounds(key)) is not None and is_list(owner):
        return _with_slice(owner, *bounds, value)
    match owner, key:
        case Left(), _:
            return owner
        case Mapping(items=entries), Known(value=str() as text):
            return Mapping({**entries, text: value})
        case Items(items=items), Known(value=int() as place) if -len(items) <= place < len(items):
            changed = list(items)
            changed[place] = value
            return Items((*changed,), kind=LIST)
    if is_list(owner):
        return _list_of(*_before(owner, key), Items((value,)), *_behind(owner, key))
    if isinstance(owner, Mapping):
        keys: list[ast.expr | None] = [ast.Constant(each) for each in owner.items]
        codes = [each.code() for each in owner.items.values()]
        return Code(ast.Dict([*keys, key.code()], [*codes, value.code()]), form=DICT)
    return Code(ast.Dict([None, key.code()], [owner.code(), value.code()]), form=DICT)


def without_item(owner: Value, key: Value, loops: bool) -> Value:
    """Return a list or a dict without an item, or those of a slice."""
    match owner, key:
        case Left(), _:
            return owner
        case Mapping(items=entries), Known(value=str() as text):
            return Mapping({each: item for each, item in entries.items() if each != text})
        case Items(items=items), Known(value=int() as place) if not loops:
            kept = [item for i, item in enumerate(items) if i != place % max(len(items), 1)]
            return Items((*kept,), kind=LIST)
    if (bounds := _bounds(key)) is not None:
        return _with_slice(owner, *bounds, Items(()))
    if not is_list(owner):
        text = (
            f"{{each: item for each, item in whole.items() if each != {ast.unparse(key.code())}}}"
        )
        made = ast.parse(text, mode="eval").body
        assert isinstance(made, ast.DictComp)
        made.generators[0].iter = call(attribute(owner.code(), "items"))
        return Code(made, form=DICT)
    if not (isinstance(key, Known) and isinstance(key.value, int)):
        raise Untranslatable("a list without an item whose place is known at run time only")
    return _list_of(*_before(owner, key), *_behind(owner, key))


def after(known: Value, attr: str, args: Sequence[Value], loops: bool) -> Changed:
    """Return what a method makes of a list or a dict, and what it gives.

    Raises:
        Untranslatable: what it does depends on what the items are.
    """
    match attr, args:
        case _ if isinstance(known, Left):
            return known, known
        case "insert", [place, item]:
            return _inserted(known, place, item, loops), NONE
        case "clear", []:
            return (Mapping({}) if is_dict(known) else _emptied(loops)), NONE
        case "reverse", [] if is_list(known):
            return _reversed(known, loops), NONE
        case "sort", [] if isinstance(known, Items) and not loops:
            return _sorted(known), NONE
        case "remove", [Known() as item] if isinstance(known, Items) and not loops:
            return _removed(known, item), NONE
        case "pop", [] if is_list(known):
            return without_item(known, _LAST, loops), item_of(known, _LAST)
        case "pop", [key]:
            return without_item(known, key, loops), item_of(known, key)
        case "pop", [key, default] if is_dict(known):
            return without_item(known, key, loops), _got(known, key, default)
        case "setdefault", [key, *rest] if is_dict(known) and len(rest) < 2:
            given = _got(known, key, *rest)
            return with_item(known, key, given), given
    raise Untranslatable(f"{attr}(...) of a list or a dict, which depends on what the items are")


def _sorted(known: Items) -> Value:
    values = [each.value for each in known.items if isinstance(each, Known)]
    if len(values) < len(known.items):
        raise Untranslatable("sort() of a list, which depends on what the items are")
    return Items((*map(Known, sorted(values)),), kind=LIST)


def _removed(known: Items, item: Known) -> Value:
    """Return a list of constants, and of what is none of them, without the first that is the same."""
    for place, each in enumerate(known.items):
        if not isinstance(each, Known):
            break
        if each.value == item.value:
            return without_item(known, Known(place), False)
    raise Untranslatable(f"remove({item.value!r}) of a list, which depends on what the items are")


def _inserted(known: Value, place: Value, item: Value, loops: bool) -> Value:
    match known, place:
        case Items(items=items), Known(value=int() as at) if not loops:
            return Items((*items[:at], item, *items[at:]), kind=LIST)
    return _list_of(*_before(known, place), Items((item,)), _part(known, place, None))


def _emptied(loops: bool) -> Value:
    return Code(ast.List([], ast.Load()), form=LIST) if loops else Items((), kind=LIST)


def _reversed(known: Value, loops: bool) -> Value:
    if isinstance(known, Items) and not loops:
        return Items(known.items[::-1], kind=LIST)
    backwards = ast.Slice(None, None, ast.Constant(-1))
    return Code(ast.Subscript(known.code(), backwards, ast.Load()), form=LIST)


def _got(known: Value, key: Value, default: Value = NONE) -> Value:
    if isinstance(known, Mapping) and isinstance(key, Known):
        return known.items.get(str(key.value), default)
    got = call(attribute(known.code(), "get"), key.code(), default.code())
    return Code(got, optional=default.may_be_none)


def _bounds(key: Value) -> tuple[Value | None, Value | None] | None:
    """Return where a slice of single steps begins and ends; None for what is none."""
    match key:
        case Known(value=slice(start=start, stop=stop, step=None | 1)):
            ends = (start, stop)
            return tuple(None if end is None else Known(end) for end in ends)  # type: ignore[return-value]
        case Code(expr=ast.Slice(lower=lower, upper=upper, step=None)):
            return tuple(None if end is None else Code(end) for end in (lower, upper))  # type: ignore[return-value]
    return None


def _with_slice(owner: Value, start: Value | None, stop: Value | None, items: Value) -> Value:
    """Return `[*owner[:start], *items, *owner[stop:]]`.

    Raises:
        Untranslatable: it cannot be told that the slice does not end before it begins.
    """
    known = [end.value for end in (start, stop) if isinstance(end, Known)]
    in_order = len(known) == 2 and known[0] <= known[1] and (known[0] < 0) == (known[1] < 0)
    if start is not None and stop is not None and not in_order:
        raise Untranslatable("items of a slice whose ends are known at run time only")
    before = [] if start is None else [_part(owner, None, start)]
    behind = [] if stop is None else [_part(owner, stop, None)]
    return _list_of(*before, items, *behind)


def _part(owner: Value, start: Value | None, stop: Value | None) -> Code:
    ends = [None if end is None else end.code() for end in (start, stop)]
    return Code(ast.Subscript(owner.code(), ast.Slice(*ends), ast.Load()), form=LIST)


def _before(owner: Value, key: Value) -> list[Code]:
    return [] if key.equals(Known(0)) else [_part(owner, None, key)]


def _behind(owner: Value, key: Value) -> list[Code]:
    """Return the items behind a place, none behind the last."""
    if isinstance(key, Known):
        return [] if key.value == -1 else [_part(owner, Known(key.value + 1), None)]
    return [_part(owner, Code(ast.BinOp(key.code(), ast.Add(), ast.Constant(1))), None)]


def _list_of(*parts: Value) -> Code:
    """Return a list of the items of several."""
    codes = [code for part in parts for code in _unpacked(part)]
    return Code(ast.List(codes, ast.Load()), form=LIST)


def _unpacked(value: Value) -> list[ast.expr]:
    if isinstance(value, Items):
        return [item.code() for item in value.items]
    return [ast.Starred(value.code(), ast.Load())]
