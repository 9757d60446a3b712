"""Attention that modeling code writes out: softmax(q k^T * scale + bias + mask) v becomes the
canonical op.

A product of two run-time tensors may be the scores of attention. It stays known as such through
scaling, biases, the mask, casts and changes of shape, until a softmax and a second product make it
attention, or something else reads it: then it is the plain code that it was. The mask is causal
(the analysis probed it), so that the op needs none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from onboard.codegen.translate.language.args import Args, plain_call
from onboard.codegen.translate.language.forms import SQUARE, TRIANGLE, UPCAST, ZEROS
from onboard.codegen.translate.language.trees.syntax import (
    attribute,
    call,
    constant,
    mentions,
    op,
    renamed,
    same_code,
)
from onboard.codegen.translate.language.values import (
    Code,
    Known,
    Mask,
    Value,
    untransposed,
)
from onboard.codegen.translate.mechanisms import numbers
from onboard.codegen.translate.mechanisms.attention import biases, repeats
from onboard.codegen.translate.mechanisms.attention.biases import KeyBias
from onboard.codegen.translate.mechanisms.attention.causal import Windowed
from onboard.codegen.translate.mechanisms.attention.repeats import Repeated
from onboard.codegen.translate.mechanisms.layouts.laid import (
    Laid,
    folded,
    heads_first,
    moved,
    reordered,
)

SOFTMAXES = (nn.functional.softmax, torch.softmax)
_SHAPES = {"view", "reshape", "to", "float", "type", "type_as", "contiguous"}
_READS = {"size", "dim"}


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
        """Return the code of query, key, scale, bias and slopes, those that there are."""
        tensors = [item.code() for item in (self.query, self.key, self.gate) if item is not None]
        return tensors + [item for item in (self.scale, self.bias, self.slopes) if item is not None]

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
        scale, bias, slopes = (code(item) for item in (self.scale, self.bias, self.slopes))
        gate = tensor(self.gate)
        return replace(self, query=query, key=key, scale=scale, bias=bias, slopes=slopes, gate=gate)


def product(left: Value, right: Value, expr: ast.expr) -> Value | None:
    """Return `left @ right`: attention when `left` are its weights, scores when it may become that,
    else None.
    """
    if isinstance(left, Scores) and left.normed and isinstance(right, Code):
        return _attention(left, right)
    if not all(isinstance(side, Code) and not side.static for side in (left, right)):
        return None
    assert isinstance(left, Code)
    assert isinstance(right, Code)
    if isinstance(left, Laid) or isinstance(right, Laid):
        return _product_of_laid(left, right, expr)
    return Scores(expr, query=left, key=_turned(right))


def _product_of_laid(left: Code, right: Code, expr: ast.expr) -> Scores | None:
    """Return such a product where a side is seen in another shape than it lies in."""
    rank = max(len(side.dims) for side in (left, right) if isinstance(side, Laid))
    order = [*range(rank - 2), rank - 1, rank - 2]
    turned = moved(right, order) if isinstance(right, Laid) else _turned(right)
    query, key = (heads_first(side, rank) for side in (left, turned))
    return None if query is None or key is None else Scores(expr, query=query, key=key)


def added(bias: Value, first: Value, second: Value, keywords: Mapping[str, Value]) -> Value | None:
    """Return `bias.baddbmm(first, second, beta=..., alpha=...)` where the bias is ALiBi's, or zero
    or taken so often.
    """
    found = product(first, second, ast.Constant(None))
    alpha, beta = keywords.get("alpha", Known(1)), keywords.get("beta", Known(1))
    if not isinstance(found, Scores) or found.normed or not (alpha.is_static and beta.is_static):
        return None
    found = replace(found, masked=True)  # there is no code of its own for it
    if not alpha.equals(Known(1)):
        found = _scaled(found, ast.Mult(), alpha.code(), found.expr)
    if isinstance(bias, KeyBias):
        scaled = biases.scaled(bias, ast.Mult(), beta)
        return combined(ast.Add(), found, scaled, found.expr) if scaled is not None else None
    none = isinstance(beta, Known) and beta.value == 0
    return found if none or isinstance(bias, Code) and bias.form == ZEROS else None


def _unfolded(value: Code) -> Code:
    """Return a tensor whose first dimension is batch times heads as one of batch one, and others as
    they are.
    """
    if type(value) is not Code or value.static:
        return value
    turned = replace(
        value, expr=call(attribute(value.expr, "unsqueeze"), ast.Constant(0)), transposed=False
    )
    return (
        Code(call(attribute(turned.expr, "transpose"), ast.Constant(-1), ast.Constant(-2)))
        if value.transposed
        else turned
    )


def _turned(key: Code) -> Code:
    """Return `key.transpose(-1, -2)`; a transposition that is written there goes."""
    if isinstance(key, Repeated):
        single = _turned(key.single)
        if type(single) is Code:
            return Repeated(single.expr, times=key.times, swapped=single.transposed)
    match key.expr:
        case ast.Call(func=ast.Attribute(value=inner, attr="transpose"), args=[first, second]):
            if {ast.unparse(first), ast.unparse(second)} in (
                {"-1", "-2"},
                {"2", "3"},
            ) and not key.transposed:
                return replace(_lifted(inner), form=key.form)
    return Code(call(attribute(key.code(), "transpose"), ast.Constant(-1), ast.Constant(-2)))


def _lifted(expr: ast.expr) -> Code:
    """Return a heads-first tensor's code, its transposition and repetition put off."""
    if (repeated := repeats.written(expr)) is not None:
        whole = _lifted(repeated[0])
        return Repeated(whole.expr, times=repeated[1], swapped=whole.transposed)
    match expr:
        case ast.Call(
            func=ast.Attribute(value=inner, attr="transpose"),
            args=[ast.Constant(1), ast.Constant(2)],
        ):
            return Code(inner, transposed=True)
    return Code(expr)


def combined(operator: ast.operator, left: Value, right: Value, expr: ast.expr) -> Value | None:
    """Return `left operator right` where one side is scores; None where that is nothing known."""
    if (
        isinstance(right, Scores)
        and not isinstance(left, Scores)
        and isinstance(operator, ast.Add | ast.Mult)
    ):
        left, right = right, left
    if not isinstance(left, Scores) or isinstance(right, Scores) or left.normed:
        return None
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
        factor = numbers.plain(right)
        if factor.is_static or numbers.is_root(factor):
            return _scaled(left, operator, factor.code(), expr)
    return None


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


def _scaled(scores: Scores, operator: ast.operator, factor: ast.expr, expr: ast.expr) -> Scores:
    old = scores.scale or ast.Constant(1.0)
    scale = (
        factor
        if scores.scale is None and isinstance(operator, ast.Mult)
        else ast.BinOp(old, operator, factor)
    )
    bias, slopes = (
        None if part is None else ast.BinOp(part, operator, factor)
        for part in (scores.bias, scores.slopes)
    )
    return replace(
        scores, expr=scores.expr if scores.masked else expr, scale=scale, bias=bias, slopes=slopes
    )


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
    if attr in ("masked_fill", "masked_fill_") and isinstance(args.positional[0], Mask):
        return replace(scores, masked=True, causal=True)
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


def call_of(obj: Any, args: Args, expr: ast.expr) -> Value | None:
    """Return the result of a function of torch that attention is made of; None for others."""
    keywords = args.keywords
    match args.positional:
        case [Code() as left, Code() as right] if obj is torch.bmm:
            return product(_unfolded(left), _unfolded(right), expr)
        case [left, right] if obj is torch.matmul:
            return product(left, right, expr)
        case [scores, *_] if obj in SOFTMAXES:
            return softmax(scores)
        case [condition, Scores() as scores, _] if obj is torch.where:
            return selected(condition, scores, expr)
        case [Scores(causal=True) as scores, _] if obj in (torch.max, torch.maximum):
            return scores  # not below the least number: no masked score matters
        case [Mask(), Scores() as scores, _] if obj is torch.where:
            return replace(scores, masked=True, causal=True)
        case [Scores() as scores, Mask(), _] if obj is torch.masked_fill:
            return replace(scores, masked=True, causal=True)
        case [Known(value=str() as axes), Code() as left, Code() as right] if obj is torch.einsum:
            return _einsum(axes.replace(" ", ""), left, right, expr)
        case [bias, first, second] if obj is torch.baddbmm:
            return added(bias, first, second, keywords)
    return None


def _einsum(axes: str, left: Code, right: Code, expr: ast.expr) -> Value | None:
    """Return a product of tensors whose dimensions have names: of queries and keys, of weights and
    values.
    """
    found = re.fullmatch(r"(\w+),(\w+)->(\w+)", axes)
    if found is None or left.static or right.static:
        return None
    one, other, out = found.groups()
    both = "".join(axis for axis in out if axis in one and axis in other)
    row, column = ("".join(axis for axis in out if axis not in each) for each in (other, one))
    inner = "".join(axis for axis in one if axis in other and axis not in out)
    if (len(row), len(column), len(inner)) != (1, 1, 1) or len(both) not in (1, 2):
        return None
    if not isinstance(left, Scores):
        query, key = (
            _named(left, one, both + row + inner),
            _named(right, other, both + column + inner),
        )
        known = query is not None and key is not None and out == both + row + column
        return Scores(expr, query=query, key=key) if known else None
    value = _named(right, other, both + inner + column)
    if not left.normed or one != both + row + inner or value is None:
        return None
    return reordered(_attention(left, value), both + row + column, out)


def _named(value: Code, axes: str, wanted: str) -> Code | None:
    """Return [batch, heads, sequence, dim] of a tensor whose dimensions have names."""
    ordered = value if axes == wanted else reordered(value, axes, wanted)
    if len(axes) == 3 and not isinstance(ordered, Laid):
        ordered, axes = _unfolded(ordered), f"_{axes}"
    return heads_first(ordered, len(axes))


def _ungrouped(key: Code, value: Code) -> tuple[Code, Code]:
    """Return keys and values before their heads are repeated for grouped queries: the op does
    that.
    """
    if (
        isinstance(key, Repeated)
        and isinstance(value, Repeated)
        and same_code(key.times, value.times)
    ):
        return key.single, value.single
    return key, value


def _attention(weights: Scores, value: Code) -> Code:
    """Return the canonical op's call; [batch, heads, sequence, dim] as the code has it."""
    assert weights.query is not None
    assert weights.key is not None
    rank = len(value.dims) if isinstance(value, Laid) else 4
    tensors = (weights.query, *_ungrouped(weights.key, heads_first(value, rank) or value))
    by_sequence = all(item.transposed for item in tensors)
    qkv = [(untransposed(item) if by_sequence else item).code() for item in tensors]
    for index in (0, 1):
        # The op has its statistics in float32, but wants tensors of one dtype
        if tensors[index].form == UPCAST:
            qkv[index] = call(attribute(qkv[index], "type_as"), qkv[2])
    scale = weights.scale or constant(1.0)
    bias = weights.bias or constant(None)
    assert weights.beyond is None or weights.window is not None
    none, window = constant(None), weights.window or constant(None)
    settings = [bias, constant(0.0), constant(True), scale, none, window, none]
    slopes = [] if weights.slopes is None else [ast.keyword("alibi_slopes", weights.slopes)]
    layout = constant("bsnd" if by_sequence else "bnsd")
    called = ast.Call(op("torch_attention"), [*qkv, *settings, layout], slopes)
    if rank == 3:
        return folded(called, by_sequence)
    single = isinstance(value.expr, ast.Call) and ast.unparse(value.expr).endswith(".unsqueeze(0)")
    return (
        Code(call(attribute(called, "squeeze"), ast.Constant(0)))
        if single
        else Code(called, transposed=by_sequence)
    )
