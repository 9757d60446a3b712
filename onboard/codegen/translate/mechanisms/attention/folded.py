"""Tensors whose batch and heads are one dimension, as attention by `bmm` has them: kept apart where
they can be.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.trees.syntax import attribute, call, constant
from onboard.codegen.translate.language.values import Code, Items, Known, Value


@dataclass(frozen=True, eq=False)
class Folded(Code):
    """`expr` [batch, heads, sequence, dim] with batch and heads as one dimension."""

    turned: bool = False
    """The last two dimensions are swapped."""
    typed = True

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


class FoldedHeads(Mechanism):
    """Batch and heads as one dimension."""

    def attribute(self, owner: Value, attr: str, frame: Frame) -> Value | None:
        """The shape."""
        return shape(owner) if isinstance(owner, Folded) and attr == "shape" else None

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """Methods of what is folded, and those that fold."""
        changed = method(owner, attr, args) if isinstance(owner, Folded) else None
        return fold(owner, attr, args) if changed is None and isinstance(owner, Code) else changed
