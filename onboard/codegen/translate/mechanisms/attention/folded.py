"""Tensors whose batch and heads are one dimension, as attention by `bmm` has them: kept apart where
they can be.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import Any

import torch

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.expressions.items import slice_code
from onboard.codegen.translate.language.forms import ROWS
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.trees.syntax import attribute, call, constant, name
from onboard.codegen.translate.language.values import Code, Items, Known, Value


@dataclass(frozen=True, eq=False)
class Folded(Code):
    """`expr` [batch, heads, sequence, dim] with batch and heads as one dimension."""

    turned: bool = False
    """The last two dimensions are swapped."""
    typed = True
    returned = True

    @property
    def annotation(self) -> str | None:  # type: ignore[override]
        """How a signature says that heads are apart, behind the sequence."""
        return "FoldedHeads" if self.transposed and not self.turned else None

    def code(self) -> ast.expr:
        """Return [batch * heads, sequence, dim], or turned."""
        unfolded = Code(self.expr, transposed=self.transposed).code()
        folded = call(attribute(unfolded, "flatten"), ast.Constant(0), ast.Constant(1))
        return (
            call(attribute(folded, "transpose"), ast.Constant(1), ast.Constant(2))
            if self.turned
            else folded
        )

    def same_as(self, other: Folded) -> bool:
        """Whether both are folded alike."""
        return super().same_as(other) and self.turned == other.turned

    def same_fact(self, other: Value) -> bool:
        """Whether both are folded alike."""
        mine = (self.transposed, self.turned)
        return isinstance(other, Folded) and mine == (other.transposed, other.turned)


_UNCHANGED = {"contiguous", "to", "float", "type", "type_as"}
_SHAPES = ("view", "reshape")
_OF_ALL = ("dtype", "device")


def fold(owner: Code, attr: str, args: Args) -> Code | None:
    """Return `x.view(batch * heads, sequence, dim)` as a folded tensor (or a shape that `x`
    has).
    """
    if attr == "flatten" and owner.transposed and _ints(args) == [0, 1]:
        return Folded(owner.expr, transposed=True)
    if attr not in _SHAPES or args.keywords:
        return None
    match args.positional:
        case [
            Code(expr=ast.BinOp(left=batch, op=ast.Mult(), right=heads), static=False),
            length,
            dim,
        ]:
            if owner.transposed:
                return Folded(owner.expr, transposed=True)
            sizes = [batch, heads, length.code(), dim.code()]
            return Folded(call(attribute(owner.expr, attr), *sizes))
        case [_, heads, Code(static=False, expr=length), _] if (
            owner.transposed and not heads.equals(Known(1))
        ):
            # [batch, heads, sequence, dim], as it is
            return None if isinstance(length, ast.BinOp) else owner
    return None


def method(owner: Folded, attr: str, args: Args) -> Value | None:
    """Return what a method of a folded tensor gives; None where that is nothing known."""
    if attr in _SHAPES and len(args.positional) == 4:
        return Code(owner.expr, transposed=owner.transposed)
    if attr in _SHAPES and len(args.positional) == 3 or attr == "contiguous":
        return owner
    if attr in _UNCHANGED:
        positional, keywords = args.code()
        return replace(owner, expr=ast.Call(attribute(owner.expr, attr), positional, keywords))
    if attr == "transpose" and sorted(item % 3 for item in _ints(args)) == [1, 2]:
        return replace(owner, turned=not owner.turned)
    if attr == "size" and not args.keywords:
        sizes = shape(owner)
        match args.positional:
            case []:
                return sizes
            case [Known(value=int() as index)]:
                return sizes.items[index]
    return None


def shape(owner: Folded) -> Items:
    """Return the three sizes of a folded tensor."""
    heads, length = (2, 1) if owner.transposed else (1, 2)
    batch, heads_size, sequence, dim = (_size(owner, index) for index in (0, heads, length, 3))
    rest = [dim, sequence] if owner.turned else [sequence, dim]
    return Items((Code(ast.BinOp(batch, ast.Mult(), heads_size)), *map(Code, rest)))


def unfolded(value: Value) -> Code | None:
    """Return [batch, heads, sequence, dim] of a folded tensor that is not turned."""
    return (
        Code(value.expr, transposed=value.transposed)
        if isinstance(value, Folded) and not value.turned
        else None
    )


def turned_back(value: Value) -> Code | None:
    """Return [batch, heads, sequence, dim] of a folded tensor that is turned, as keys are."""
    return (
        unfolded(replace(value, turned=False))
        if isinstance(value, Folded) and value.turned
        else None
    )


def _size(owner: Folded, index: int) -> ast.expr:
    return ast.Subscript(attribute(owner.expr, "shape"), constant(index), ast.Load())


def _ints(args: Args) -> list[int]:
    return [
        item.value
        for item in args.positional
        if isinstance(item, Known) and type(item.value) is int
    ]


def _is_plain(value: Value) -> bool:
    return isinstance(value, Folded) and not value.turned


def pointwise(op: ast.operator, left: Value, right: Value) -> Folded | None:
    """Return `left op right` of two folded tensors, or of one and rows of a table or a number."""
    if isinstance(left, Folded) and isinstance(right, Folded):
        alike = left.same_fact(right) and not left.turned
        return replace(left, expr=ast.BinOp(left.expr, op, right.expr)) if alike else None
    for folded, other in ((left, right), (right, left)):
        if not isinstance(folded, Folded) or folded.turned:
            continue
        table: ast.expr
        if isinstance(other, Code) and other.form == ROWS:
            table = call(attribute(other.code(), "unsqueeze"), constant(1 + folded.transposed))
        elif other.is_static:
            table = other.code()
        else:
            return None
        sides = (folded.expr, table) if folded is left else (table, folded.expr)
        return replace(folded, expr=ast.BinOp(sides[0], op, sides[1]))
    return None


def joined_along_last(args: Args) -> Folded | None:
    """Return `torch.cat(parts, dim=-1)` of folded tensors."""
    match args.positional:
        case [Items(items=[Folded(turned=False) as first, *_] as parts), *last] if all(
            first.same_fact(part) for part in parts
        ):
            dim = last[0] if last else args.keywords.get("dim")
            if isinstance(dim, Known) and dim.value in (-1, 2):
                codes: list[ast.expr] = [part.expr for part in parts if isinstance(part, Folded)]
                cat = attribute(name("torch"), "cat")
                whole = call(cat, ast.Tuple(codes, ast.Load()), dim=constant(-1))
                return replace(first, expr=whole)
    return None


class FoldedHeads(Mechanism):
    """Batch and heads as one dimension."""

    def attribute(self, owner: Value, attr: str, frame: Frame) -> Value | None:
        """The shape, and what does not depend on it."""
        if not isinstance(owner, Folded):
            return None
        known = {"shape": shape(owner), "ndim": Known(3)}
        return known.get(attr, Code(attribute(owner.expr, attr)) if attr in _OF_ALL else None)

    def unary(self, op: ast.unaryop, operand: Value) -> Value | None:
        """Each number's own."""
        if not isinstance(operand, Folded):
            return None
        return replace(operand, expr=ast.UnaryOp(op, operand.expr))

    def binary(self, op: ast.operator, left: Value, right: Value, frame: Frame) -> Value | None:
        """Number by number."""
        return None if isinstance(op, ast.MatMult) else pointwise(op, left, right)

    def item(self, owner: Value, index: Value, node: ast.Subscript, frame: Frame) -> Value | None:
        """Part of the last dimension."""
        if not _is_plain(owner) or not isinstance(owner, Folded):
            return None
        match index, node.slice:
            case Items(items=(Known(value=first), _)), ast.Tuple(elts=[_, ast.Slice() as part]) if (
                first is Ellipsis
            ):
                cut = ast.Tuple([ast.Constant(...), slice_code(part, frame)], ast.Load())
                return replace(owner, expr=ast.Subscript(owner.expr, cut, ast.Load()))
        return None

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """Parts of the last dimension that are joined."""
        return joined_along_last(args) if function is torch.cat else None

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """Methods of what is folded, and those that fold."""
        changed = method(owner, attr, args) if isinstance(owner, Folded) else None
        return fold(owner, attr, args) if changed is None and isinstance(owner, Code) else changed
