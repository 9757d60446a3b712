"""Tables of all positions that modeling code cuts to the length of the text before it looks
positions up in them.

The rows that are looked up are those of the whole table: the cut goes. Where nothing is looked up
in what is left, it has one row for each token, which are those of positions that are counted.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from onboard.codegen.translate.language.args import Args, plain_call
from onboard.codegen.translate.language.expressions.calls import call_value
from onboard.codegen.translate.language.expressions.decisions import WrittenOut, local_values
from onboard.codegen.translate.language.forms import POSITIONS, ROWS, ROWS_OF_HEADS
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import Global, Instance
from onboard.codegen.translate.language.trees.casts import without_casts
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, call
from onboard.codegen.translate.language.values import Code, Items, Known, Value
from onboard.codegen.translate.mechanisms.counted_positions import positions

_CASTS = ("to", "float", "type", "type_as", "half", "bfloat16", "contiguous")
_JOINS = (torch.cat, torch.concat)
_ANY = 2
_EVERYTHING = (slice(None), slice(0, None))


@dataclass(frozen=True, eq=False)
class Cut(Code):
    """The first rows of a table, one for each position of the text; `expr` is the whole table."""

    axis: int = 0
    """The dimension of positions; all before it have size one."""
    unread: ClassVar[str] = "a table, cut to the text's length, in which no positions are looked up"
    typed: ClassVar[bool] = True
    returned: ClassVar[bool] = True

    def same_as(self, other: Any) -> bool:
        """Whether both are the same table."""
        return self.axis == other.axis and super().same_as(other)

    def same_fact(self, other: Value) -> bool:
        """Whether two facts say the same."""
        return isinstance(other, Cut) and self.axis == other.axis

    def joined(self, other: Value) -> Value:
        """Refuse: a function that gets a whole table elsewhere would not know which it has."""
        raise Untranslatable("a table that is cut to the text's length here and not there")

    def changed(self, expr: ast.expr, axis: int | None = None) -> Cut:
        """Return the same rows of another table."""
        return Cut(expr, axis=self.axis if axis is None else axis)


@dataclass(frozen=True, eq=False)
class Table(Code):
    """A table that a function is given; what it cuts from it may be the text's rows."""

    shape: tuple[int, ...] = ()
    """That of the small model's table."""
    typed: ClassVar[bool] = True
    returned: ClassVar[bool] = True

    def same_fact(self, other: Value) -> bool:
        """Whether two facts say the same: sizes may differ, but for those of one."""
        return isinstance(other, Table) and self._ones == other._ones

    @property
    def _ones(self) -> list[bool]:
        return [size == 1 for size in self.shape]


@dataclass(frozen=True, eq=False)
class Tables(Code):
    """A tuple of tables that a function is given."""

    shapes: tuple[tuple[int, ...], ...] = ()
    """Those of the small model's tables."""
    typed: ClassVar[bool] = True

    def same_fact(self, other: Value) -> bool:
        """Whether two facts say the same."""
        return isinstance(other, Tables) and self.shapes == other.shapes

    def item(self, place: int) -> Table:
        """Return one of them."""
        part = ast.Subscript(self.code(), ast.Constant(place), ast.Load())
        return Table(part, shape=self.shapes[place])


def cut_axis(index: Value, shape: Sequence[int]) -> int | None:
    """Return the dimension along which `table[index]` keeps as many rows as are known at run time;
    None where it does something else.
    """
    parts = _by_dimension(index.items if isinstance(index, Items) else (index,), len(shape))
    cuts = [place for place, part in enumerate(parts) if not _is_everything(part)]
    if len(cuts) != 1:
        return None
    match parts[cuts[0]]:
        case Code(expr=ast.Slice(lower=lower, upper=upper, step=None), static=False) if _is_of_text(
            lower, upper
        ):
            leading = math.prod(shape[: cuts[0]]) == 1 and len(shape) > cuts[0] + 1
            return cuts[0] if leading else None
    return None


def _cuts_nothing(index: Value, shape: Sequence[int]) -> bool:
    """Whether an index cuts a dimension of size one to the text's length, which leaves all there is."""
    parts = _by_dimension(index.items if isinstance(index, Items) else (index,), len(shape))
    cuts = [place for place, part in enumerate(parts) if not _is_everything(part)]
    match [parts[place] for place in cuts]:
        case [Code(expr=ast.Slice(lower=lower, upper=upper, step=None), static=False)]:
            return shape[cuts[0]] == 1 and _is_of_text(lower, upper)
    return False


def _bounds_written_out(index: Value, frame: Frame) -> Value:
    """Return an index whose bounds have no variables that are assigned once."""
    match index:
        case Items(items=items):
            return Items(tuple(_bounds_written_out(item, frame) for item in items))
        case Code(expr=ast.Slice() as bounds, static=False):
            written = WrittenOut(local_values(frame)).visit(deepcopy(bounds))
            return replace(index, expr=written)
    return index


def _is_of_text(lower: ast.expr | None, upper: ast.expr | None) -> bool:
    """Whether rows are the first ones, or the last `b` of `a`, as `a - b : a`: those of a text."""
    match lower:
        case None | ast.Constant(value=0):
            return True
        case ast.BinOp(left=end, op=ast.Sub()):
            return upper is not None and ast.dump(end) == ast.dump(upper)
    return False


def _by_dimension(parts: tuple[Value, ...], dimensions: int) -> tuple[Value, ...]:
    """Return the parts of an index with as many slices of everything as an ellipsis stands for."""
    places = [place for place, part in enumerate(parts) if _is_ellipsis(part)]
    if len(places) != 1:
        return parts
    missing = dimensions - (len(parts) - 1)
    return (*parts[: places[0]], *[Known(slice(None))] * missing, *parts[places[0] + 1 :])


def _is_everything(part: Value) -> bool:
    return isinstance(part, Known) and part.value in _EVERYTHING


def _is_ellipsis(part: Value) -> bool:
    return isinstance(part, Known) and part.value is Ellipsis


def shape_of_table(owner: Value, frame: Frame, *, learnt: bool = False) -> tuple[int, ...] | None:
    """Return the shape, in the small model's modules, of a floating-point tensor that is no
    parameter, unless it may be `learnt`, which an attribute of `self` is or the function was given.
    """
    if isinstance(owner, Table):
        return owner.shape
    if not isinstance(owner, Code) or owner.static or frame.kind != "forward" or frame.cls is None:
        return None
    bare = without_casts(owner.expr)
    if isinstance(bare, ast.Name):
        bare = without_casts(local_values(frame).get(bare.id, bare))
    match bare:
        case ast.Attribute(value=ast.Name(id="self"), attr=attr):
            found = [getattr(m, attr, None) for m in frame.translator.modules_of(frame.cls.cls)]
            if found and all(_is_float_table(each, learnt) for each in found):
                return tuple(found[0].shape)  # type: ignore[union-attr]
    return None


def _with_tables(args: Args, frame: Frame) -> Args | None:
    """Return arguments of which those that are tables are known as such; None where none is that
    was not.
    """

    def known(value: Value) -> Value:
        if isinstance(value, Items) and value.items:
            shapes = [shape_of_table(part, frame) for part in value.items]
            given = tuple(each for each in shapes if each is not None)
            return Tables(value.code(), shapes=given) if len(given) == len(shapes) else value
        shape = None if isinstance(value, Table) else shape_of_table(value, frame)
        return value if shape is None else Table(value.code(), shape=shape)

    positional = [known(value) for value in args.positional]
    keywords = {key: known(value) for key, value in args.keywords.items()}
    every = (*positional, *keywords.values())
    found = [value for value in every if isinstance(value, Table | Tables)]
    new = [value for value in found if value not in (*args.positional, *args.keywords.values())]
    return Args(positional, keywords, args.stars) if new else None


def _is_float_table(item: object, learnt: bool) -> bool:
    return (
        isinstance(item, torch.Tensor)
        and (learnt or not isinstance(item, nn.Parameter))
        and (item.is_floating_point() or item.is_complex())
    )


class CutTables(Mechanism):
    """`table[:length]`, and `rows[position_ids]` of what is left."""

    def item(self, owner: Value, index: Value, node: ast.Subscript, frame: Frame) -> Value | None:
        """The cut, and the rows that are looked up."""
        if isinstance(owner, Cut):
            return _looked_up(owner, index)
        if isinstance(owner, Tables) and isinstance(index, Known) and isinstance(index.value, int):
            return owner.item(index.value)
        if _is_all_rows(owner, index, frame):
            return owner
        shape = shape_of_table(owner, frame, learnt=True)
        if shape is None or not isinstance(owner, Code):
            return None
        if frame.translator.specialised:
            index = _bounds_written_out(index, frame)
        if (rows := _behind_a_new_dimension(owner, index, shape, frame)) is not None:
            return rows
        if frame.translator.specialised and _cuts_nothing(index, shape):
            return Table(owner.code(), shape=shape)
        axis = cut_axis(index, shape)
        if axis is None:
            return None
        if (counted := positions(frame)) is not None:
            return _counted_rows(owner.code(), axis, counted.expr)
        return Cut(owner.code(), axis=axis)

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """`embedding(positions, rows)`, and functions that are given tables."""
        match args.positional:
            case [Code() as where, Cut() as table] if function is nn.functional.embedding:
                return _looked_up(table, where)
            case [Items(items=items), *_] if function in _JOINS:
                return _joined(items, expr, args)
        if frame.translator.is_helper(function) and (given := _with_tables(args, frame)):
            return call_value(Global(function, expr), given, frame)
        return None

    def call_value(self, callee: Value, args: Args, frame: Frame) -> Value | None:
        """Modules that are given tables."""
        given = _with_tables(args, frame) if isinstance(callee, Instance) else None
        return None if given is None else call_value(callee, given, frame)

    def call_own_method(self, attr: str, args: Args, frame: Frame) -> Value | None:
        """Methods that are given tables."""
        given = _with_tables(args, frame)
        return None if given is None else frame.translator.call_own_method(attr, given, frame)

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """What is done to each row, and dimensions of size one that go."""
        if isinstance(owner, Table) and attr in _CASTS:
            return replace(owner, expr=plain_call(attribute(owner.expr, attr), args).expr)
        if not isinstance(owner, Cut):
            return None
        if attr in _CASTS:
            return owner.changed(plain_call(attribute(owner.expr, attr), args).expr)
        match attr, args.positional:
            case "squeeze", [Known(value=int() as dim)] if 0 <= dim != owner.axis:
                called = plain_call(attribute(owner.expr, attr), args).expr
                return owner.changed(called, owner.axis - (dim < owner.axis))
        return None

    def attribute(self, owner: Value, attr: str, frame: Frame) -> Value | None:
        """What a cut does not change."""
        if isinstance(owner, Cut) and attr in ("dtype", "device"):
            return Code(attribute(owner.expr, attr))
        return None


def _joined(parts: Sequence[Value], expr: ast.expr, args: Args) -> Cut | None:
    """Return cuts of several tables, side by side; None where a part is none, or they are put one
    behind the other.
    """
    cuts = [part for part in parts if isinstance(part, Cut)]
    match args.positional[1:], args.keywords:
        case ([Known(value=-1)], {}) | ([], {"dim": Known(value=-1)}) if len(cuts) == len(parts):
            if {cut.axis for cut in cuts} == {0}:
                tables: list[ast.expr] = [cut.expr for cut in cuts]
                return Cut(call(expr, ast.Tuple(tables, ast.Load()), dim=ast.Constant(-1)))
    return None


def _is_all_rows(owner: Value, index: Value, frame: Frame) -> bool:
    """Whether an index cuts rows of a text's positions, [sequence, dim], to the text's length."""
    if not isinstance(owner, Code) or owner.form != ROWS or owner.transposed:
        return False
    return cut_axis(_bounds_written_out(index, frame), (_ANY, _ANY)) == 0


def _behind_a_new_dimension(
    table: Code, index: Value, shape: Sequence[int], frame: Frame
) -> Code | None:
    """Return `table[None, :length, ...]` of a table [positions, ...]: generated code has the batch in
    front; None for anything else.
    """
    match index:
        case Items(items=(Known(value=None), cut, *rest)) if (
            rest and cut_axis(Items((cut,)), shape) == 0
        ):
            if (counted := positions(frame)) is None:
                return None
            rows = ast.Subscript(table.code(), counted.expr, ast.Load())
            every = [Known(slice(None)), Known(slice(None)), *rest]
            inside = ast.Tuple([part.code() for part in every], ast.Load())
            return Code(ast.Subscript(rows, inside, ast.Load()))
    return None


def _counted_rows(table: ast.expr, axis: int, counted: ast.expr) -> Code:
    """Return the rows of counted positions, [batch, ..., sequence, ...]: the batch is where the
    first dimension of size one is, others of size one stay.
    """
    if axis == 0:
        return Code(ast.Subscript(table, counted, ast.Load()), form=ROWS)
    for _ in range(axis):
        table = ast.Subscript(table, ast.Constant(0), ast.Load())
    rows: ast.expr = ast.Subscript(table, counted, ast.Load())
    for _ in range(axis - 1):
        rows = call(attribute(rows, "unsqueeze"), ast.Constant(1))
    return Code(rows, form=ROWS_OF_HEADS if axis == 2 else None)


def _looked_up(table: Cut, index: Value) -> Value | None:
    """Return `table[positions]`, [batch, sequence, ...], where positions are the first dimension."""
    if table.axis != 0 or not isinstance(index, Code) or index.static:
        return None
    form = ROWS if index.form == POSITIONS else None
    return Code(ast.Subscript(table.expr, index.code(), ast.Load()), form=form)
