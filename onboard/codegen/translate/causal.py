"""Masks that code other than attention reads: an indexer keeps its scores causal with attention's own mask."""

from __future__ import annotations

import ast

import torch

from onboard.codegen.translate.values import Code, Global, Value, attribute, call, constant, name, residual


def mask_attribute(attr: str) -> Value | None:
    """Return an attribute of an attention mask that is known without one: transformers' eager masks are added."""
    return Global(torch.float32, attribute(name("torch"), "float32")) if attr == "dtype" else None


def masked(scores: Code) -> Code:
    """Return `scores + mask` for scores [..., queries, keys] of one text's tokens: later keys get the least number."""
    expr = residual(scores)
    ones = call(attribute(name("torch"), "ones_like"), expr, dtype=attribute(name("torch"), "bool"))
    later = call(attribute(ones, "triu"), ast.Constant(1))
    return Code(call(attribute(expr, "masked_fill"), later, constant(float("-inf"))))
