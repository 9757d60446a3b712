"""Bounds of attention's scores: masked scores that are kept from being below the least number, or
beyond the greatest one, too, which makes infinities finite and changes no other score.
"""

from __future__ import annotations

import ast
from copy import deepcopy
from typing import Any

import torch

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.expressions.decisions import WrittenOut, local_values
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.values import NONE, Value
from onboard.codegen.translate.mechanisms.attention.causal import is_least

_NAMES = ("max", "maximum", "clamp", "clamp_", "clamp_min", "clamp_min_", "clip", "clip_")
BOUNDING = tuple(getattr(torch, name) for name in _NAMES)


def is_bound(attr: str) -> bool:
    """Whether a method keeps numbers from being below another one."""
    return attr in _NAMES


def is_clamp(function: Any) -> bool:
    """Whether a function, or a method by its name, keeps numbers between two."""
    clamps = ("clamp", "clamp_", "clip", "clip_")
    return function in clamps or function in [getattr(torch, name) for name in clamps]


def bounds_nothing(function: Any, bounds: Args, frame: Frame) -> bool:
    """Whether a function, called so of scores and `bounds`, changes no score that counts."""
    places = dict(zip(("min", "max"), bounds.positional, strict=False))
    lower = bounds.keywords.get("min", bounds.keywords.get("other", places.get("min", NONE)))
    upper = bounds.keywords.get("max", places.get("max", NONE))
    free = upper.equals(NONE) or _is_greatest(upper, frame)
    return function in BOUNDING and free and _is_least(lower, frame)


def _is_greatest(value: Value, frame: Frame) -> bool:
    """Whether a value is `torch.finfo(dtype).max` of a tensor's dtype, or of float32: scores may be
    greater than half precision goes.
    """
    match WrittenOut(local_values(frame)).visit(deepcopy(value.code())):
        case ast.Attribute(value=ast.Call(args=[ast.Attribute(attr="dtype" | "float32")])) as node:
            return _is_limit(node, "max")
    return False


def _is_least(value: Value, frame: Frame) -> bool:
    """Whether a value is `torch.finfo(dtype).min`, or as low, as a number or a tensor."""
    return _is_low(WrittenOut(local_values(frame)).visit(deepcopy(value.code())))


def _is_low(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr="tensor" | "full" | "full_like"), args=[*_, number]):
            return _is_low(number)
        case ast.Call(func=ast.Attribute(value=tensor, attr="to" | "type_as")):
            return _is_low(tensor)
        case ast.UnaryOp(op=ast.USub(), operand=number) if _is_limit(number, "max"):
            return True
    return _is_limit(node, "min") or is_least(node)


def _is_limit(node: ast.expr, end: str) -> bool:
    match node:
        case ast.Attribute(value=ast.Call(func=called), attr=attr):
            return attr == end and ast.unparse(called) == "torch.finfo"
    return False
