"""What is known of whether a value is a tuple or a list, also where code has handed it on."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import replace

import torch

from onboard.codegen.translate.language.forms import (
    DICT,
    LIST,
    LIST_OR_NOT,
    MAYBE,
    ROWS,
    SEVERAL_ROWS,
    TENSORS,
    TUPLE,
    TUPLE_OR_NOT,
    TUPLES,
)
from onboard.codegen.translate.language.holes import Hole, Result
from onboard.codegen.translate.language.object_values import Repeated
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.language.values import NONE, Code, Items, Mapping, Value

_OF_MAYBE = f"dict of {MAYBE}"
_FORMS = (TUPLE, LIST, TUPLE_OR_NOT, LIST_OR_NOT)
_ALSO: dict[str | None, str] = {SEVERAL_ROWS: TUPLE, TENSORS: TUPLE, TUPLES: LIST}
_OF_ONE_KIND: dict[str | None, str] = {SEVERAL_ROWS: ROWS, TUPLES: TUPLE}
_TYPES: dict[str | None, type] = {TUPLE: tuple, LIST: list, DICT: dict}


def sequence_of(value: Value) -> str | None:
    """Return the form of a tuple, a list or a dict, and of what may be one of the first two; None: it is
    none.
    """
    match value:
        case Items():
            return None if value.whole is not None else value.kind
        case Mapping():
            return DICT
        case Code(form=form) | Hole(form=form) if form == DICT:
            return DICT
        case Result(shape=shape):
            return sequence_of(shape)
        case Code(form=form) | Hole(form=form):
            return _ALSO.get(form, form if form in _FORMS else None)
    return None


def sequence_of_all(values: Iterable[Value]) -> str | None:
    """Return the form of what is one value or another; None among them does not count."""
    values = [value for value in values if not value.equals(NONE)]
    kinds = {sequence_of(value) for value in values}
    if kinds == {TUPLE} and all(map(_has_tensors_alone, values)):
        return TENSORS
    if len(kinds) < 2:
        return kinds.pop() if kinds else None
    if DICT in kinds:
        return None
    return TUPLE_OR_NOT if kinds <= {None, TUPLE, TUPLE_OR_NOT} else LIST_OR_NOT


def _has_tensors_alone(value: Value) -> bool:
    """Whether each item of a tuple is a tensor for certain."""
    match value:
        case Items(items=items) | Result(shape=Items(items=items)):
            return all(map(_is_tensor, items))
        case Code(form=form) | Hole(form=form):
            return form in (TENSORS, SEVERAL_ROWS)
    return False


def _is_tensor(value: Value) -> bool:
    """Whether nothing says that a value is a setting, or may be None or a tuple."""
    known = value.is_static or value.may_be_none or sequence_of(value) is not None
    return isinstance(value, Code | Hole) and not known


def at_run_time(value: Value) -> Code | None:
    """Return a list or a dict whose items are known as one that exists at run time, where code may
    change it; None for other values.
    """
    match value:
        case Items(items=items, kind=kind, whole=None) if kind == LIST:
            return Code(ast.List([item.code() for item in items], ast.Load()), form=LIST)
        case Mapping():
            return Code(value.code(), form=DICT)
    return None


def fact_of(value: Value) -> Value:
    """Return what a function may know of an argument: of a tuple, whether it has tensors alone."""
    fact = value.fact()
    if isinstance(fact, Code) and fact.form == TUPLE and _has_tensors_alone(value):
        return replace(fact, form=TENSORS)
    return fact


def item_in(expr: ast.expr, owner: Code) -> Code:
    """Return an item of a tuple, a list or a tensor: of the former two it is anything, None or a
    tuple, too, unless all that they have is of one kind.
    """
    if owner.form in _FORMS and not owner.static:
        return Code(expr, form=TUPLE_OR_NOT, optional=True)
    return Code(expr, owner.static, form=_OF_ONE_KIND.get(owner.form))


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
