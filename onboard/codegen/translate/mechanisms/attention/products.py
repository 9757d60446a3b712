"""Products that attention is made of: of queries and keys, of weights and values."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.forms import UPCAST, ZEROS
from onboard.codegen.translate.language.trees.syntax import (
    attribute,
    call,
    constant,
    op,
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
from onboard.codegen.translate.mechanisms.attention.repeats import Repeated
from onboard.codegen.translate.mechanisms.attention.scores import (
    SOFTMAXES,
    Scores,
    capped,
    combined,
    scaled,
    selected,
    softmax,
)
from onboard.codegen.translate.mechanisms.layouts.laid import (
    Laid,
    folded,
    heads_first,
    moved,
    reordered,
)

_PARAMETERS = {
    torch.bmm: ("input", "mat2"),
    torch.matmul: ("input", "other"),
    torch.baddbmm: ("input", "batch1", "batch2"),
    torch.masked_fill: ("input", "mask", "value"),
    torch.softmax: ("input", "dim"),
    nn.functional.softmax: ("input", "dim"),
}
"""Functions whose arguments may be given by name, and the names of those that may."""


def call_of(obj: Any, args: Args, expr: ast.expr) -> Value | None:
    """Return the result of a function of torch that attention is made of; None for others."""
    names = [
        key for key in _PARAMETERS.get(obj, ())[len(args.positional) :] if key in args.keywords
    ]
    keywords = {key: value for key, value in args.keywords.items() if key not in names}
    match [*args.positional, *(args.keywords[key] for key in names)]:
        case [Code() as left, Code() as right] if obj is torch.bmm:
            return product(_unfolded(left), _unfolded(right), expr)
        case [left, right] if obj is torch.matmul:
            return product(left, right, expr)
        case [scores, *_] if obj in SOFTMAXES:
            return softmax(scores)
        case [Scores() as scores] if obj is torch.tanh:
            return capped(scores, expr)
        case [condition, Scores() as scores, _] if obj is torch.where:
            return selected(condition, scores, expr)
        case [Mask(), Scores() as scores, _] if obj is torch.where:
            return replace(scores, masked=True, causal=True)
        case [Scores() as scores, Mask(), _] if obj is torch.masked_fill:
            return replace(scores, masked=True, causal=True)
        case [Known(value=str() as axes), Code() as left, Code() as right] if obj is torch.einsum:
            return _einsum(axes.replace(" ", ""), left, right, expr)
        case [bias, first, second] if obj is torch.baddbmm:
            return added(bias, first, second, keywords)
    return None


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
    alpha, beta = (numbers.counted(keywords.get(key, Known(1))) for key in ("alpha", "beta"))
    if not isinstance(found, Scores) or found.normed or not (alpha.is_static and beta.is_static):
        return None
    found = replace(found, masked=True)  # there is no code of its own for it
    if not alpha.equals(Known(1)):
        found = scaled(found, ast.Mult(), alpha.code(), found.expr)
    if isinstance(bias, KeyBias):
        slopes = biases.scaled(bias, ast.Mult(), beta)
        return combined(ast.Add(), found, slopes, found.expr) if slopes is not None else None
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
        case ast.Attribute(value=inner, attr="mT") if not key.transposed:
            return replace(_lifted(inner), form=key.form)
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


def _einsum(axes: str, left: Code, right: Code, expr: ast.expr) -> Value | None:
    """Return a product of tensors whose dimensions have names: of queries and keys, of weights and
    values.
    """
    found = re.fullmatch(r"(\w+),(\w+)->(\w+)", axes)
    if found is None or left.static or right.static:
        return None
    one, other, out = found.groups()
    if _shared_by_heads(one, other, out):
        # What all heads share: they are one more dimension, of size one
        right = Code(call(attribute(right.code(), "unsqueeze"), ast.Constant(1)))
        other = f"{other[0]}{one[1]}{other[1:]}"
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


def _shared_by_heads(one: str, other: str, out: str) -> bool:
    """Whether axes are those of `bhql,blc->bhqc`: the second dimension is the first tensor's alone."""
    leading = one[:2] == out[:2]
    return (len(one), len(other)) == (4, 3) and leading and set(out[:2]) - set(other) == {out[1]}


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
    cap = weights.cap or none
    settings = [bias, constant(0.0), constant(True), scale, none, window, cap]
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
