"""What code does with tensors that it sees in another shape than they have."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import torch

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.expressions.calls import call_value
from onboard.codegen.translate.language.expressions.items import item_of, slice_code
from onboard.codegen.translate.language.expressions.tensor_methods import tensor_method
from onboard.codegen.translate.language.forms import POSITIONS, ROWS
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import Instance
from onboard.codegen.translate.language.trees.syntax import attribute, call, constant, name
from onboard.codegen.translate.language.values import Code, Items, Known, Value
from onboard.codegen.translate.mechanisms.counted_positions import is_cut
from onboard.codegen.translate.mechanisms.layouts.laid import (
    Laid,
    aligned,
    as_other,
    last_in_place,
    moved,
    rows,
)
from onboard.codegen.translate.mechanisms.layouts.merges import (
    SHAPES,
    fold,
    ints,
    merged,
    reshaped,
)

_ON_EACH = {"to", "float", "type", "type_as", "half", "bfloat16", "neg"}
_OF_ALL = ("dtype", "device")
_EVERY = slice(None)


class Layouts(Mechanism):
    """Dimensions that are swapped and merged."""

    def attribute(self, owner: Value, attr: str, frame: Frame) -> Value | None:
        """The shape, and what does not depend on it."""
        if not isinstance(owner, Laid):
            return None
        known = {"shape": owner.sizes(), "ndim": Known(len(owner.dims))}
        return known.get(attr, Code(attribute(owner.expr, attr)) if attr in _OF_ALL else None)

    def unary(self, op: ast.unaryop, operand: Value) -> Value | None:
        """Each number's own."""
        if not isinstance(operand, Laid):
            return None
        return replace(operand, expr=ast.UnaryOp(op, operand.expr))

    def binary(self, op: ast.operator, left: Value, right: Value, frame: Frame) -> Value | None:
        """Number by number."""
        return None if isinstance(op, ast.MatMult) else _pointwise(op, left, right)

    def item(self, owner: Value, index: Value, node: ast.Subscript, frame: Frame) -> Value | None:
        """Part of the last dimension; rows with dimensions of size one."""
        if frame.translator.specialised and (found := _of_rows(owner, index, node, frame)):
            return found
        match owner, index, node.slice:
            case (
                Laid(is_rows=False),
                Items(items=(Known(value=first), _)),
                ast.Tuple(elts=[_, ast.Slice() as part]),
            ) if first is Ellipsis and len(owner.dims[-1]) == 1:
                whole = last_in_place(owner)
                cut = ast.Tuple([ast.Constant(...), slice_code(part, frame)], ast.Load())
                return replace(whole, expr=ast.Subscript(whole.expr, cut, ast.Load()))
        return None

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """Parts of the last dimension that are joined."""
        return _joined_along_last(args) if function is torch.cat else None

    def call_value(self, callee: Value, args: Args, frame: Frame) -> Value | None:
        """Modules are given tensors as code sees them, but for heads that are apart."""
        if not isinstance(callee, Instance):
            return None
        given = (*args.positional, *args.keywords.values())
        if not any(isinstance(value, Laid) and value.as_seen() is not value for value in given):
            return None
        positional = [_as_seen(value) for value in args.positional]
        keywords = {key: _as_seen(value) for key, value in args.keywords.items()}
        return call_value(callee, Args(positional, keywords, args.stars), frame)

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """Methods that change the shape, or each number, and those that begin with either."""
        if isinstance(owner, Laid):
            return _method(owner, attr, args, frame)
        return fold(owner, attr, args) if isinstance(owner, Code) else None


def _as_seen(value: Value) -> Value:
    return value.as_seen() if isinstance(value, Code) else value


def _method(owner: Laid, attr: str, args: Args, frame: Frame) -> Value | None:
    """Return what a method gives; None where that is nothing known."""
    rank, numbers = len(owner.dims), ints(_flat(args))
    if attr == "contiguous":
        return owner
    if attr in _ON_EACH:
        positional, keywords = args.code()
        return replace(owner, expr=ast.Call(attribute(owner.expr, attr), positional, keywords))
    if attr in ("size", "dim") and not args.keywords:
        sizes = owner.sizes()
        return Known(rank) if attr == "dim" else sizes.items[numbers[0]] if numbers else sizes
    if owner.is_rows:
        return tensor_method(Code(owner.code(), form=ROWS), attr, args)
    if attr in SHAPES and not (args.keywords or args.stars):
        return reshaped(owner, _flat(args), frame)
    if attr == "transpose" and len(numbers) == 2:
        order = list(range(rank))
        first, second = (number % rank for number in numbers)
        order[first], order[second] = second, first
        return moved(owner, order)
    if attr == "permute" and len(numbers) == rank:
        return moved(owner, [number % rank for number in numbers])
    if attr == "flatten" and len(numbers) == 2:
        return merged(owner, *numbers)
    return None


def _flat(args: Args) -> list[Value]:
    """Return the arguments, or those of the tuple that is the only one."""
    match args.positional:
        case [Items(items=items)]:
            return list(items)
    return args.positional


def _pointwise(op: ast.operator, left: Value, right: Value) -> Laid | None:
    """Return `left op right` of two tensors that are seen alike, or of one and rows of a table or a
    number.
    """
    if isinstance(left, Laid) and isinstance(right, Laid) and (beside := as_other(right, left)):
        return replace(left, expr=ast.BinOp(left.expr, op, beside))
    for one, other in ((left, right), (right, left)):
        if not isinstance(one, Laid):
            continue
        beside = other.code() if other.is_static else None
        if (table := rows(other)) is not None and not one.is_rows:
            beside = aligned(table, one)
        if beside is not None:
            sides = (one.expr, beside) if one is left else (beside, one.expr)
            return replace(one, expr=ast.BinOp(sides[0], op, sides[1]))
    return None


def _of_rows(owner: Value, index: Value, node: ast.Subscript, frame: Frame) -> Value | None:
    """Return rows of a table with dimensions of size one, those of the text, or a part of each."""
    table = rows(owner)
    if table is None or not isinstance(owner, Code):
        return None
    parts = index.items if isinstance(index, Items) else (index,)
    first, *others = parts
    every = isinstance(first, Known) and first.value == _EVERY
    if any(part.equals(Known(None)) for part in others) and (every or is_cut(first)):
        return _with_ones(table, others)
    if not isinstance(owner, Laid):
        return None
    if is_cut(first) and all(isinstance(each, Known) and _is_all(each.value) for each in others):
        return owner
    if isinstance(first, Code) and first.form == POSITIONS and not others:
        return owner
    return item_of(Code(owner.code(), form=ROWS), index, node, frame)


def _with_ones(table: Laid, parts: list[Value]) -> Laid | None:
    """Return `rows[:, parts]`, of which each is everything or a new dimension."""
    dims, rest = [table.dims[0]], list(table.dims[1:])
    for part in parts:
        if part.equals(Known(None)):
            dims.append(())
        elif rest and isinstance(part, Known) and part.value == _EVERY:
            dims.append(rest.pop(0))
        elif not (isinstance(part, Known) and part.value is Ellipsis):
            return None
    return replace(table, dims=(*dims, *rest))


def _is_all(value: object) -> bool:
    return value is Ellipsis or value == _EVERY


def _joined_along_last(args: Args) -> Laid | None:
    """Return `torch.cat(parts, dim=-1)` of tensors that are seen alike."""
    match args.positional:
        case [Items(items=[Laid() as first, *_] as parts), *last] if all(
            first.same_fact(part) for part in parts
        ):
            dim = last[0] if last else args.keywords.get("dim")
            at_end = isinstance(dim, Known) and dim.value in (-1, len(first.dims) - 1)
            if at_end and first.dims[-1] == (first.axes - 1,):
                codes: list[ast.expr] = [part.expr for part in parts if isinstance(part, Laid)]
                cat = attribute(name("torch"), "cat")
                whole = call(cat, ast.Tuple(codes, ast.Load()), dim=constant(-1))
                return replace(first, expr=whole)
    return None
