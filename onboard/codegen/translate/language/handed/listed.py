"""Lists of objects: of known length as their objects, one by one, else at run time as a list of tuples
of their fields.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from onboard.codegen.translate.language.args import spread
from onboard.codegen.translate.language.forms import LIST
from onboard.codegen.translate.language.handed.by_name import ByName, Output, shared
from onboard.codegen.translate.language.holes import Hole, Result, fill
from onboard.codegen.translate.language.records import Record
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.language.values import NONE, Code, Items, Known, Mask, Value

_ITEM = "item"


@dataclass(frozen=True, eq=False)
class Listed(ByName, Items):
    """A list or tuple of known length in which objects are."""

    cls = None

    @property
    def entries(self) -> dict[str, Value]:
        """The items by their numbers."""
        return {str(place): item for place, item in enumerate(self.items)}

    def having(self, entries: dict[str, Value]) -> Listed:
        """Return it with other items."""
        return replace(self, items=(*entries.values(),))


@dataclass(frozen=True, eq=False)
class Objects(Code):
    """A list of any length of objects of one kind: of tuples of their fields but constants, or of their
    only field.
    """

    shape: Value = NONE
    """An object with holes for what its tuple has."""
    annotation = "list[Any]"
    typed = True
    returned = True

    def item(self, expr: ast.expr) -> Value:
        """Return an object whose tuple is at a place."""
        holes = [part for part in spread({_ITEM: self.shape}).values() if isinstance(part, Hole)]
        places: list[ast.expr] = [expr]
        if len(holes) > 1:
            places = [ast.Subscript(expr, ast.Constant(i), ast.Load()) for i in range(len(holes))]
        made = shared(fill(self.shape, [Code(place, self.static) for place in places]))
        if isinstance(expr, ast.Subscript) and isinstance(made, Output) and not self.static:
            return replace(made, stored=partial(self._with, expr))
        return made

    def _with(self, place: ast.Subscript, value: ByName) -> ast.stmt:
        """Return the statement that puts another object's tuple in a place."""
        target = ast.Subscript(place.value, place.slice, ast.Store())
        return ast.Assign([target], self.tuple_of(value))

    def tuple_of(self, value: Value) -> ast.expr:
        """Return the code of another item's tuple.

        Raises:
            Untranslatable: it is of another kind.
        """
        if isinstance(value, ByName):
            shape, (code,) = tuple_of([value])
            if self.is_like(shape):
                return code
        raise Untranslatable("a list of objects of several kinds")

    def same_fact(self, other: Value) -> bool:
        """Whether another list is known to have objects of the same kind."""
        return isinstance(other, Objects) and super().same_fact(other) and self.is_like(other.shape)

    def is_like(self, shape: Value) -> bool:
        """Whether objects of a shape may be items, too."""
        return isinstance(shape, ByName) and shape.is_like(self.shape) and shape.equals(self.shape)

    def joined(self, other: Value) -> Value:
        """Raise: another list has other objects."""
        raise Untranslatable("a list of objects that is one of others elsewhere")


def as_object(value: Value) -> Value:
    """Return an object of settings with its fields."""
    if not isinstance(value, Record):
        return value
    return Output({key: value.entry(key) for key in value.entries})


def listed(value: Value) -> Value:
    """Return a list of known length in which objects are as one; others as they are."""
    if type(value) is not Items or not any(isinstance(item, ByName) for item in value.items):
        return value
    return Listed(value.items, value.kind)


def tuple_of(objects: Sequence[ByName]) -> tuple[Value, list[ast.expr]]:
    """Return what objects have in common, with holes for the rest, and the code of each that fills
    them: a tuple, or what is in the only hole.

    Raises:
        Untranslatable: they are of different kinds.
    """
    first, *others = objects
    if not all(first.is_like(other) for other in others):
        raise Untranslatable("a list of objects of several kinds")
    known = first.fact()
    for other in others:
        known = known.joined(other.fact())
    shape, holes = _with_holes(known, 0)
    codes = [_codes(shape, each) for each in objects]
    if holes == 0:
        raise Untranslatable("a list of objects that are all the same")
    return shape, [each[0] if holes == 1 else ast.Tuple(each, ast.Load()) for each in codes]


def made_of(element: Value) -> tuple[Value, ast.expr] | None:
    """Return what the objects of a comprehension have in common, with holes, and the code of what fills
    them; None for other elements.
    """
    match element:
        case Result(shape=ByName() as shape, expr=expr):
            return shape, expr
        case ByName():
            common, (code,) = tuple_of([element])
            return common, code
    return None


def one_of(
    objects: Sequence[Value], by: Value, choice: Callable[[list[ast.expr]], ast.expr]
) -> Value:
    """Return one of several objects, which one is known at run time only: each field is what a choice
    by some value makes of those of the objects.

    Raises:
        Untranslatable: they are of different kinds.
    """
    first, *others = objects
    if all(first.equals(other) for other in others) and isinstance(first, Known | Mask):
        return first
    if isinstance(first, ByName) and all(first.is_like(other) for other in others):
        rows = [each.entries for each in objects if isinstance(each, ByName)]
        columns = {key: one_of([row[key] for row in rows], by, choice) for key in first.entries}
        return shared(first.having(columns))
    if any(isinstance(item, ByName) for item in objects):
        raise Untranslatable("one of several objects of different kinds")
    static = by.is_static and all(item.is_static for item in objects)
    optional = any(item.may_be_none for item in objects)
    return Code(choice([item.code() for item in objects]), static, optional=optional)


def item_of(objects: Sequence[Value], index: Value) -> Value:
    """Return an object of a list at a place that is known at run time only."""

    def choice(codes: list[ast.expr]) -> ast.expr:
        return ast.Subscript(ast.Tuple(codes, ast.Load()), index.code(), ast.Load())

    return one_of(objects, index, choice)


def entry_of(objects: Mapping[str, Value], key: Value) -> Value:
    """Return an object of a dict under a key that is known at run time only."""
    keys: list[ast.expr | None] = [ast.Constant(each) for each in objects]

    def choice(codes: list[ast.expr]) -> ast.expr:
        return ast.Subscript(ast.Dict(keys, codes), key.code(), ast.Load())

    return one_of([*objects.values()], key, choice)


def at_run_time(value: Listed) -> Objects:
    """Return a list of known length as one of tuples."""
    objects = [item for item in value.items if isinstance(item, ByName)]
    if len(objects) != len(value.items):
        raise Untranslatable("a list of objects and others")
    shape, codes = tuple_of(objects)
    return Objects(ast.Tuple(codes, ast.Load()), value.is_static, form=LIST, shape=shape)


def _with_holes(known: Value, index: int) -> tuple[Value, int]:
    if isinstance(known, ByName):
        parts = {}
        for key, part in known.entries.items():
            parts[key], index = _with_holes(part, index)
        return known.having(parts), index
    if isinstance(known, Known | Mask):
        return known, index
    form = known.form if isinstance(known, Code) else None
    return Hole(index, form, known.may_be_none), index + 1


def _codes(shape: Value, value: Value) -> list[ast.expr]:
    if isinstance(shape, Hole):
        return [value.code()]
    if not isinstance(shape, ByName):
        return []
    assert isinstance(value, ByName)
    parts = ((part, value.entries[key]) for key, part in shape.entries.items())
    return [code for pair in parts for code in _codes(*pair)]
