"""Masks that code other than attention reads: an indexer keeps its scores causal with attention's own mask."""

from __future__ import annotations

import ast

import torch

from onboard.codegen.translate.values import (
    Code,
    Global,
    Known,
    Mask,
    Value,
    attribute,
    call,
    constant,
    name,
    residual,
    same,
)


def mask_attribute(attr: str) -> Value | None:
    """Return an attribute of an attention mask that is known without one: transformers' eager masks are added."""
    return Global(torch.float32, attribute(name("torch"), "float32")) if attr == "dtype" else None


def hidden(op: ast.cmpop, mask: Value, other: Value) -> bool:
    """Whether `mask != 0` is asked for, which is true of the keys that are hidden."""
    return type(mask) is Mask and isinstance(op, ast.NotEq) and same(other, Known(0))


def filled(owner: Code, value: ast.expr) -> Code:
    """Return `x.masked_fill(hidden, value)` for x [..., queries, keys] of one text's tokens."""
    expr = residual(owner)
    ones = call(attribute(name("torch"), "ones_like"), expr, dtype=attribute(name("torch"), "bool"))
    return Code(call(attribute(expr, "masked_fill"), call(attribute(ones, "triu"), ast.Constant(1)), value))


def masked(scores: Code) -> Code:
    """Return `scores + mask` for scores [..., queries, keys] of one text's tokens: later keys get the least number."""
    return filled(scores, constant(float("-inf")))
