"""Numbers that modeling code has as tensors without dimensions, a scale that is a square root, and
numbers that an exported graph must not take for constants.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.expressions.decisions import (
    WrittenOut,
    assigned,
    statements_of,
)
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.statements.assignments.own_attributes import store_attribute
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, call, name
from onboard.codegen.translate.language.values import NONE, Code, Known, Value

_OF_NUMBERS = ("math.sqrt", "float")


class Numbers(Mechanism):
    """`self.scale = torch.sqrt(torch.tensor(size))`, which no checkpoint has, as a number; one-hot
    vectors of as many classes as are known at run time only.
    """

    def set_attribute(self, attr: str, value: Value, frame: Frame) -> Value | None:
        """Such a number."""
        if frame.kind != "init" or frame.cls is None or not isinstance(value, Code) or value.static:
            return None
        kept = [vars(item).get(attr) for item in frame.translator.modules_of(frame.cls.cls)]
        return _as_number(value, kept)

    def call_own_method(self, attr: str, args: Args, frame: Frame) -> Value | None:
        """Such a number that is registered as a buffer apart from the checkpoint."""
        if frame.kind != "init" or frame.cls is None or not frame.translator.specialised:
            return None
        match attr, args.positional, args.keywords.get("persistent"):
            case "register_buffer", [Known(value=str() as key), Code() as value], Known(
                value=False
            ):
                modules = frame.translator.modules_of(frame.cls.cls)
                number = _as_number(value, [item._buffers.get(key) for item in modules])
                if number is not None:
                    store_attribute(key, number, frame, None)
                    return NONE
        return None

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """`one_hot(indices, length)` as a comparison: an export counts classes once and for all.

        What numpy counts becomes float64 where it is divided, which torch's does not.
        """
        if function is np.arange and "dtype" not in args.keywords:
            raise Untranslatable("numpy.arange without a dtype")
        match [*args.positional, *args.keywords.values()]:
            case [Code(static=False) as indices, Code(static=False) as classes] if (
                function is F.one_hot
            ):
                made = attribute(name("torch"), "arange")
                numbers = call(made, classes.code(), device=attribute(indices.code(), "device"))
                each = call(attribute(indices.code(), "unsqueeze"), ast.Constant(-1))
                return Code(call(attribute(ast.Compare(each, [ast.Eq()], [numbers]), "long")))
        return None


def _as_number(value: Code, kept: Sequence[object]) -> Code | None:
    """Return a tensor without dimensions, `kept` by the small model's modules, as a number; None for
    others.
    """
    if not value.static and kept and all(map(_is_number, kept)):
        return Code(call(name("float"), value.code()), static=True)
    return None


def counted(value: Value) -> Value:
    """Return a number computed of tensors of one number, `torch.tensor(1.0) / self.scale`, without
    these; others as they are.
    """
    if type(value) is not Code or value.static:
        return value
    bare = _Bare().visit(deepcopy(value.expr))
    return Code(bare, static=True) if _is_of_sizes(bare) else value


class _Bare(ast.NodeTransformer):
    """Writes `torch.tensor(1.0, dtype=...)` as 1.0."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Leave the tensor out."""
        match node:
            case ast.Call(func=function, args=[ast.Constant() as number]) if (
                ast.unparse(function) == "torch.tensor"
            ):
                return number
        return node


def plain(value: Value) -> Value:
    """Return x of `torch.full((), x)`, and others as they are."""
    match value:
        case Code(
            expr=ast.Call(func=function, args=[ast.Tuple(elts=[]) | ast.List(elts=[]), number])
        ) if ast.unparse(function) == "torch.full":
            return Code(number, static=_is_of_sizes(number))
    return value


def of_unpacked_sizes(value: Value, frame: Frame) -> Value:
    """Return a number made of the last size of a shape that was unpacked, as `c ** -0.5` behind
    `b, t, c = x.shape`, as one that the module's sizes tell; others as they are.
    """
    if type(value) is not Code or value.static:
        return value
    whole = WrittenOut(_last_sizes(frame)).visit(deepcopy(value.expr))
    told = ast.dump(whole) != ast.dump(value.expr) and _is_of_sizes(whole)
    return replace(value, static=True) if told else value


def _last_sizes(frame: Frame) -> dict[str, ast.expr]:
    """Return `x.shape[-1]` for each variable that is the last of a shape unpacked to several."""
    last, found = ast.UnaryOp(ast.USub(), ast.Constant(1)), {}
    for statement in statements_of(frame):
        match statement:
            case ast.Assign(
                targets=[ast.Tuple(elts=[_, _, *_, ast.Name(id=variable)])],
                value=(
                    ast.Attribute(value=tensor, attr="shape")
                    | ast.Call(func=ast.Attribute(value=tensor, attr="size"), args=[])
                ),
            ):
                found[variable] = ast.Subscript(attribute(tensor, "shape"), last, ast.Load())
    made = assigned(frame) if found else {}
    return {name: expr for name, expr in found.items() if len(made[name]) == 1}


def _is_of_sizes(expr: ast.expr) -> bool:
    """Whether a number is computed of the sizes of heads and the module's numbers alone."""
    match expr:
        case ast.BinOp(left=left, right=right):
            return _is_of_sizes(left) and _is_of_sizes(right)
        case ast.UnaryOp(op=ast.USub(), operand=number):
            return _is_of_sizes(number)
        case ast.Call(func=function, args=[number]) if ast.unparse(function) in _OF_NUMBERS:
            return _is_of_sizes(number)
        case ast.Call(func=ast.Attribute(attr="size"), args=[place]):
            return ast.unparse(place) == "-1"
        case ast.Subscript(value=ast.Attribute(attr="shape"), slice=place):
            return ast.unparse(place) == "-1"
        case ast.Attribute(value=ast.Name(id="self" | "config")) | ast.Constant():
            return True
    return False


def is_factor(value: Value) -> bool:
    """Whether a value is a number that is a square root, or computed of the sizes of heads."""
    if not isinstance(value, Code):
        return False
    text = ast.unparse(value.expr)
    called = isinstance(value.expr, ast.Call) and text.startswith("math.sqrt(")
    return called or _is_of_sizes(value.expr)


def _is_number(item: object) -> bool:
    return isinstance(item, torch.Tensor) and item.dim() == 0 and item.is_floating_point()
