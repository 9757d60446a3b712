"""Attention that modeling code writes out: softmax(q k^T * scale + bias + mask) v becomes the
canonical op.

A product of two run-time tensors may be the scores of attention. It stays known as such through
scaling, biases, the mask, casts and changes of shape, until a softmax and a second product make it
attention, or something else reads it: then it is the plain code that it was. The mask is causal
(the analysis probed it), so that the op needs none.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from onboard.codegen.translate.language.args import Args, plain_call
from onboard.codegen.translate.language.forms import SQUARE, TRIANGLE
from onboard.codegen.translate.language.trees.syntax import (
    attribute,
    call,
    constant,
    mentions,
    name,
    renamed,
    same_code,
)
from onboard.codegen.translate.language.values import (
    Code,
    Items,
    Known,
    Mask,
    Value,
)
from onboard.codegen.translate.mechanisms import numbers
from onboard.codegen.translate.mechanisms.attention.biases import KeyBias
from onboard.codegen.translate.mechanisms.attention.causal import Seen, Windowed
from onboard.codegen.translate.mechanisms.tables import Table

SOFTMAXES = (nn.functional.softmax, torch.softmax)
_SHAPES = {"view", "reshape", "to", "float", "type", "type_as", "contiguous"}
_READS = {"size", "dim"}
_ONE = ast.Constant(1.0)


@dataclass(frozen=True, eq=False)
class Scores(Code):
    """The product of two tensors, perhaps attention's scores or (`normed`) weights; `expr` computes
    them unmasked.
    """

    query: Code | None = None
    key: Code | None = None
    """[batch, heads, sequence, dim], as the query."""
    scale: ast.expr | None = None
    bias: ast.expr | None = None
    slopes: ast.expr | None = None
    """Of a bias that is linear in the key's position."""
    cap: ast.expr | None = None
    """c of c * tanh(q k^T * scale / c)."""
    gate: Code | None = None
    """The triangle that the scores were multiplied with, to be made a mask of."""
    causal: bool = False
    """The mask is in."""
    beyond: int | None = None
    """Of a mask with a window: how many keys more than the config's window it shows."""
    window: ast.expr | None = None
    """How many keys the mask shows; None: all."""
    normed: bool = False
    lazy = True
    attends: ClassVar[bool] = True
    """They may become attention's weights."""

    def same_as(self, other: Scores) -> bool:
        """Whether both lead to the same attention."""
        flags = (self.masked, self.causal, self.normed, self.beyond) == (
            other.masked,
            other.causal,
            other.normed,
            other.beyond,
        )
        return flags and [ast.dump(part) for part in self.made_of()] == [
            ast.dump(part) for part in other.made_of()
        ]

    def made_of(self) -> list[ast.expr]:
        """Return the code of query, key, scale, bias, slopes and cap, those that there are."""
        tensors = [item.code() for item in (self.query, self.key, self.gate) if item is not None]
        others = (self.scale, self.bias, self.slopes, self.cap)
        return tensors + [item for item in others if item is not None]

    def mentions(self, variable: str) -> bool:
        """Whether what it is made of reads a variable."""
        return any(mentions(part, variable) for part in self.made_of())

    def renamed(self, old: str, new: str) -> Scores:
        """Return the scores with another name for a variable in what they are made of."""

        def tensor(value: Code | None) -> Code | None:
            return None if value is None else replace(value, expr=renamed(value.expr, old, new))

        def code(value: ast.expr | None) -> ast.expr | None:
            return None if value is None else renamed(value, old, new)

        query, key = tensor(self.query), tensor(self.key)
        parts = ("scale", "bias", "slopes", "cap")
        changed: dict[str, Any] = {part: code(getattr(self, part)) for part in parts}
        return replace(self, query=query, key=key, gate=tensor(self.gate), **changed)


@dataclass(frozen=True, eq=False)
class Weights(Items):
    """Attention's weights as a function returns them: `items` are the queries, scaled, and the keys
    that they are made of, for the code that multiplies them with values.
    """


def handed(weights: Scores) -> Weights | None:
    """Return weights for whoever gets them; None where they are made of more than two tensors."""
    more = (weights.bias, weights.slopes, weights.cap, weights.gate, weights.window)
    if type(weights) is not Scores or any(more) or weights.beyond is not None:
        return None
    assert weights.query is not None
    assert weights.key is not None
    query: Value = weights.query
    if weights.scale is not None:
        query = Code(ast.BinOp(query.code(), ast.Mult(), weights.scale))
    return Weights((query, Code(weights.key.code())))


def taken(weights: Weights) -> Scores:
    """Return the weights that a function has returned."""
    query, key = weights.items
    assert isinstance(query, Code)
    assert isinstance(key, Code)
    bare = ast.Constant(None)  # nothing but a product with values has code
    return Scores(bare, query=query, key=key, causal=True, masked=True, normed=True)


def combined(operator: ast.operator, left: Value, right: Value, expr: ast.expr) -> Value | None:
    """Return `left operator right` where one side is scores; None where that is nothing known."""
    if (
        isinstance(right, Scores)
        and not isinstance(left, Scores)
        and isinstance(operator, ast.Add | ast.Mult)
    ):
        left, right = right, left
    if not isinstance(left, Scores) or left.normed:
        return None
    if isinstance(right, Scores):
        return joined(left, right, expr) if isinstance(operator, ast.Add) else None
    if isinstance(operator, ast.Add) and isinstance(right, Mask):
        beyond = right.beyond if isinstance(right, Windowed) else None
        return replace(left, masked=True, causal=True, beyond=beyond)
    if isinstance(operator, ast.Add) and isinstance(right, KeyBias):
        slopes = (
            right.expr if left.slopes is None else ast.BinOp(left.slopes, ast.Add(), right.expr)
        )
        return replace(left, masked=True, slopes=slopes, causal=left.causal or right.causal)
    if left.gate is not None:
        return _closed(left, operator, right)
    if (
        isinstance(operator, ast.Mult)
        and isinstance(right, Code)
        and right.form == TRIANGLE
        and left.bias is None
    ):
        return replace(left, expr=expr, gate=right)
    if isinstance(operator, ast.Add) and isinstance(right, Code) and not right.static:
        plain = left.expr if left.masked else expr
        bias = right.code() if left.bias is None else ast.BinOp(left.bias, ast.Add(), right.code())
        return replace(left, expr=plain, bias=bias)
    if isinstance(operator, ast.Mult | ast.Div):
        if isinstance(right, Table) and not right.shape:
            return _weighed(left, operator, right.code(), expr)
        factor = numbers.plain(right)
        if factor.is_static or numbers.is_factor(factor):
            return scaled(left, operator, factor.code(), expr)
    return None


def joined(first: Scores, second: Scores, expr: ast.expr) -> Value | None:
    """Return `q1 k1^T + q2 k2^T`, as latent attention has it, which is the product of the queries
    side by side and the keys side by side; None where more than that was done to either.
    """
    if not (_is_bare(first) and _is_bare(second)):
        return None
    query, key = (
        Code(
            call(
                attribute(name("torch"), "cat"),
                ast.List([a.code(), b.code()], ast.Load()),
                dim=constant(-1),
            )
        )
        for a, b in ((first.query, second.query), (first.key, second.key))
        if a is not None and b is not None
    )
    return Scores(expr, query=query, key=key)


def _is_bare(scores: Scores) -> bool:
    """Whether scores are a product and nothing else."""
    later = (scores.scale, scores.bias, scores.slopes, scores.cap, scores.gate)
    return type(scores) is Scores and not (any(later) or scores.masked or scores.normed)


def _closed(scores: Scores, operator: ast.operator, right: Value) -> Value | None:
    """Return `scores * gate + minimum * (1 - gate)` as scores with a mask."""
    assert scores.gate is not None
    if not isinstance(right, Code) or not isinstance(operator, ast.Add):
        return None
    match right.expr:
        case ast.BinOp(
            left=least,
            op=ast.Mult(),
            right=ast.BinOp(left=ast.Constant(value=1), op=ast.Sub(), right=gate),
        ):
            if same_code(gate, scores.gate.expr) and _is_minimum(least):
                return replace(scores, gate=None, causal=True, masked=True)
    return None


def _is_minimum(expr: ast.expr) -> bool:
    """Whether a number is so low that its exponential is zero beside any score's."""
    try:
        value = ast.literal_eval(expr)
    except ValueError:
        return False
    return isinstance(value, float | int) and value <= -1e4


def scaled(scores: Scores, operator: ast.operator, factor: ast.expr, expr: ast.expr) -> Scores:
    """Return scores times or divided by a number, and their cap and all that was added to them."""
    parts = ("bias", "slopes", "cap")
    changed: dict[str, Any] = {
        part: _times(getattr(scores, part), operator, factor) for part in parts
    }
    scale = scores.scale
    if scale is None:
        scale = factor if isinstance(operator, ast.Mult) else ast.BinOp(_ONE, operator, factor)
    else:
        scale = _times(scale, operator, factor)
    return replace(scores, expr=scores.expr if scores.masked else expr, scale=scale, **changed)


def _weighed(scores: Scores, operator: ast.operator, factor: ast.expr, expr: ast.expr) -> Scores:
    """Return scores times or divided by a buffer without dimensions: the queries are, and all that was
    added. A mask stays what it is, for no causal model has a number there that lifts it.
    """
    assert scores.query is not None
    query = replace(scores.query, expr=ast.BinOp(scores.query.expr, operator, factor))
    whole = scaled(scores, operator, factor, expr)
    return replace(whole, query=query, scale=scores.scale)


def _times(part: ast.expr | None, operator: ast.operator, factor: ast.expr) -> ast.expr | None:
    """Return `part operator factor`; x of `x / factor * factor`, as caps have it."""
    match part:
        case None:
            return None
        case ast.BinOp(left=inner, op=ast.Div(), right=divisor) if isinstance(
            operator, ast.Mult
        ) and same_code(divisor, factor):
            return inner
        case ast.Constant(value=1.0) if isinstance(operator, ast.Mult):
            return factor
    return ast.BinOp(part, operator, factor)


def capped(scores: Scores, expr: ast.expr) -> Value | None:
    """Return `tanh(scores)`, scores with a cap of one; None where something was added before."""
    added = scores.bias or scores.slopes or scores.gate or scores.cap
    if type(scores) is not Scores or added or scores.masked or scores.normed:
        return None
    return replace(scores, expr=expr, cap=_ONE)


def method(scores: Scores, attr: str, args: Args, expr: ast.expr) -> Value | None:
    """Return what a method of scores gives; None where that is nothing known."""
    if attr.startswith("new_") and scores.query is not None:
        made = plain_call(
            attribute(scores.query.expr, attr), args
        )  # of their dtype, where they are
        square = (
            attr == "new_ones" and len({ast.dump(item.code()) for item in args.positional}) == 1
        )
        return replace(made, form=SQUARE) if square and len(args.positional) == 2 else made
    plain = scores.expr if scores.masked else expr
    if attr in _SHAPES:
        return replace(scores, expr=plain)
    if attr == "softmax":
        return softmax(scores)
    if attr in ("tanh", "tanh_"):
        return capped(scores, expr)
    if attr in ("masked_fill", "masked_fill_") and isinstance(args.positional[0], Mask):
        sees = isinstance(args.positional[0], Seen)
        return None if sees else replace(scores, masked=True, causal=True)
    if attr == "size" and not scores.normed and (size := _size(scores, args)) is not None:
        return size
    if attr in _READS:
        return Code(expr)
    return None


def _size(scores: Scores, args: Args) -> Code | None:
    """Return the number of queries or keys, without scores."""
    assert scores.query is not None
    assert scores.key is not None
    tensors = {-2: scores.query, -1: scores.key}
    match args.positional:
        case [Known(value=int() as index)] if index in tensors:
            owner = tensors[index]
            return Code(
                call(attribute(owner.expr, "size"), constant(-3 if owner.transposed else -2))
            )
    return None


def softmax(scores: Value) -> Value | None:
    """Return attention's weights for its masked scores; None for anything else."""
    if type(scores) is Scores and scores.causal and not scores.normed:
        return replace(scores, normed=True)
    return None


def selected(condition: Value, scores: Value, expr: ast.expr) -> Value | None:
    """Return `torch.where(condition, scores, minimum)`: the condition is a mask of its own."""
    if not isinstance(scores, Scores) or scores.normed or not isinstance(condition, Code):
        return None
    if scores.bias is not None:
        return None
    if condition.form == TRIANGLE:
        return replace(scores, causal=True, masked=True)
    plain = scores.expr if scores.masked else expr
    return replace(scores, expr=plain, bias=condition.code())
