"""What is known of whether a value is a tuple or a list, also where code has handed it on."""

from __future__ import annotations

import ast
from collections.abc import Iterable

import torch

from onboard.codegen.translate.language.forms import (
    LIST,
    LIST_OR_NOT,
    MAYBE,
    SEVERAL_ROWS,
    TUPLE,
    TUPLE_OR_NOT,
    TUPLES,
)
from onboard.codegen.translate.language.holes import Hole, Result
from onboard.codegen.translate.language.object_values import Repeated
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.language.values import NONE, Code, Items, Value

_OF_MAYBE = f"dict of {MAYBE}"
_FORMS = (TUPLE, LIST, TUPLE_OR_NOT, LIST_OR_NOT)
_ALSO: dict[str | None, str] = {SEVERAL_ROWS: TUPLE, TUPLES: LIST}
_TYPES: dict[str | None, type] = {TUPLE: tuple, LIST: list}


def sequence_of(value: Value) -> str | None:
    """Return the form of a tuple or a list, and of what may be one; None: it is none."""
    match value:
        case Items():
            return None if value.whole is not None else value.kind
        case Result(shape=shape):
            return sequence_of(shape)
        case Code(form=form) | Hole(form=form):
            return _ALSO.get(form, form if form in _FORMS else None)
    return None


def sequence_of_all(values: Iterable[Value]) -> str | None:
    """Return the form of what is one value or another; None among them does not count."""
    kinds = {sequence_of(value) for value in values if not value.equals(NONE)}
    if len(kinds) < 2:
        return kinds.pop() if kinds else None
    return TUPLE_OR_NOT if kinds <= {None, TUPLE, TUPLE_OR_NOT} else LIST_OR_NOT


def joined_lists(left: Value, right: Value) -> Code | None:
    """Return `left + right` of lists of which one has a length that is known at run time only; None
    for others.
    """
    sides = (left, right)
    if all(isinstance(side, Items) for side in sides) or not all(map(_is_list, sides)):
        return None
    codes = [
        ast.List([item.code() for item in side.items], ast.Load())
        if isinstance(side, Items)
        else side.code()
        for side in sides
    ]
    form = _OF_MAYBE if any(map(_may_have_none, sides)) else LIST
    return Code(ast.BinOp(codes[0], ast.Add(), codes[1]), form=form)


def _is_list(value: Value) -> bool:
    match value:
        case Items(kind=kind, whole=None):
            return kind == LIST
        case Code(form=form):
            return form in (LIST, _OF_MAYBE)
    return isinstance(value, Repeated)


def _may_have_none(value: Value) -> bool:
    match value:
        case Items(items=items):
            return any(item.may_be_none for item in items)
        case Repeated(item=item):
            return item.may_be_none
    return isinstance(value, Code) and value.form == _OF_MAYBE


def is_one_of(value: Value, classes: tuple[type, ...], *, has_lists: bool) -> bool | None:
    """Return whether a tuple, a list or a tensor is of one of some classes; None: that shows at run
    time, of a list where the generated code `has_lists`, too, as a constructor has.

    Raises:
        Untranslatable: it may be a list, which generated code has as a tuple.
    """
    kind = sequence_of(value)
    if kind == LIST_OR_NOT and has_lists:
        return None
    if kind == LIST_OR_NOT:
        raise Untranslatable(f"whether {_named(value)} is a list, which it is on one way only")
    if kind == TUPLE_OR_NOT:
        return None
    return issubclass(_TYPES.get(kind, torch.Tensor), classes)


def _named(value: Value) -> str:
    return ast.unparse(value.code())
