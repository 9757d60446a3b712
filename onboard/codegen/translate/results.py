"""What a translated function returns, and what its callers know of that."""

from __future__ import annotations

import ast

from onboard.codegen.translate.frame import Frame
from onboard.codegen.translate.values import (
    NONE,
    Code,
    Config,
    Half,
    Hole,
    Items,
    Known,
    Mask,
    Output,
    Result,
    Value,
    residual,
    same,
    same_code,
)


def finish_returns(frame: Frame) -> tuple[Value, int]:
    """Give every return statement its code; return the shape of what a caller gets and its run-time parts."""
    if not frame.returns:
        return NONE, 0
    values = [value for _, value in frame.returns]
    shape, holes = _shape(values, 0)
    for statement, value in frame.returns:
        parts = _run_time_parts(shape, value)
        codes = [residual(part) for part in parts]
        statement.value = codes[0] if len(codes) == 1 else ast.Tuple(codes, ast.Load()) if codes else None
    return shape, holes


def with_logits_alone(value: Value) -> Value:
    """Return a model's output without what other losses and other modalities read."""
    return (
        Output({"logits": value.fields["logits"]}) if isinstance(value, Output) and "logits" in value.fields else value
    )


def _shape(values: list[Value], index: int) -> tuple[Value, int]:
    """Return the common shape of several results: what all know stays known, the rest are holes."""
    first = values[0]
    if isinstance(first, Known | Mask | Config) and all(same(first, value) for value in values):
        return first, index
    parts: list[Value] = []
    match first:
        case Items(items=(Half(), Half())):
            return Hole(index, form=first.items[0].whole.form), index + 1  # type: ignore[attr-defined]
        case Items(items=items) if all(isinstance(v, Items) and len(v.items) == len(items) for v in values):
            for column in zip(*(value.items for value in values), strict=True):  # type: ignore[attr-defined]
                part, index = _shape(list(column), index)
                parts.append(part)
            return Items(tuple(parts)), index
        case Output(fields=fields) if all(isinstance(v, Output) and v.fields.keys() == fields.keys() for v in values):
            for key in fields:
                part, index = _shape([value.fields[key] for value in values], index)  # type: ignore[attr-defined]
                parts.append(part)
            return Output(dict(zip(fields, parts, strict=True))), index
    form = first.form if isinstance(first, Code) else None
    return Hole(index, form), index + 1


def _run_time_parts(shape: Value, value: Value) -> list[Value]:
    match shape, value:
        case Hole(), _:
            return [value]
        case Items(items=shapes), Items(items=items):
            return [part for item in zip(shapes, items, strict=True) for part in _run_time_parts(*item)]
        case Output(fields=shapes), Output(fields=fields):
            return [part for key in shapes for part in _run_time_parts(shapes[key], fields[key])]
    return []


def same_call(first: Value, second: Value) -> bool:
    """Whether two classes' forwards are called by the same code and give results of one shape."""
    match first, second:
        case Result(), Result():
            return same_code(first.expr, second.expr) and same(first.shape, second.shape)
        case Items(items=a), Items(items=b):
            return len(a) == len(b) and all(map(same_call, a, b))
    return same(first, second)
