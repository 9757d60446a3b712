"""Biases of attention that are linear in the key's position (ALiBi, Press et al. 2022,
arXiv:2108.12409).

Softmax does not see what all keys of a query have in common, so the slopes are all that counts of
such a bias: where it starts to count, how it is repeated over the batch and cut to the keys that
there are does not matter.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.forms import KEYS
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, call
from onboard.codegen.translate.language.values import Code, Known, Value


@dataclass(frozen=True, eq=False)
class KeyBias(Code):
    """A bias of attention that is linear in the key's position (ALiBi); `expr`, its slopes, is what
    is left of it.
    """

    unread = "a bias of positions that more than attention reads"
    typed = True
    returned = True
    annotation = "AlibiSlopes"


_SHAPES = {
    "view",
    "reshape",
    "repeat",
    "expand",
    "squeeze",
    "unsqueeze",
    "contiguous",
    "to",
    "float",
    "type_as",
}
_ROUNDS = {"half", "bfloat16"}


def counted(obj: Any, expr: ast.expr, args: Args, frame: Frame) -> Code | None:
    """Return `torch.arange(...)` of a number of keys that the config says, in steps of one."""
    if obj is not torch.arange or not frame.translator.findings.alibi or len(args.positional) > 2:
        return None
    positional, keywords = args.code()
    return Code(ast.Call(expr, positional, keywords), form=KEYS)


def key_method(keys: Code, attr: str, args: Args) -> Code | None:
    """Return counted keys in another shape or type; None for what is nothing known."""
    if attr not in _SHAPES:
        return None
    if isinstance(keys.expr, ast.Name):
        return keys
    positional, keywords = args.code()
    return replace(keys, expr=ast.Call(attribute(keys.expr, attr), positional, keywords))


def combined(operator: ast.operator, left: Value, right: Value) -> KeyBias | None:
    """Return slopes times counted keys, and a bias times a number; None for anything else."""
    for one, other in ((left, right), (right, left)):
        if (
            isinstance(one, KeyBias)
            and other.is_static
            and (one is left or isinstance(operator, ast.Mult))
        ):
            return scaled(one, operator, other)
        if (
            isinstance(operator, ast.Mult)
            and _is_keys(one)
            and isinstance(other, Code)
            and not other.static
        ):
            return KeyBias(_vector(other.expr))
    return None


def scaled(bias: KeyBias, operator: ast.operator, factor: Value) -> KeyBias | None:
    """Return a bias times or divided by a number."""
    if not isinstance(operator, ast.Mult | ast.Div):
        return None
    if isinstance(factor, Known) and factor.value == 1:
        return bias
    return replace(bias, expr=ast.BinOp(bias.expr, operator, factor.code()))


def _is_keys(value: Value) -> bool:
    return isinstance(value, Code) and value.form == KEYS


def _vector(slopes: ast.expr) -> ast.expr:
    """Return slopes [heads] of any shape of theirs."""
    match slopes:
        case ast.Call(func=ast.Attribute(attr=attr)) if attr in _ROUNDS:
            raise Untranslatable("a bias of positions that is rounded to half precision")
        case ast.Subscript(value=ast.Name() as vector, slice=index) if keeps_heads(index):
            return vector
    return call(attribute(slopes, "flatten"))


def keeps_heads(index: ast.expr) -> bool:
    """Whether an index takes no head away and no other step through the keys."""
    items: Sequence[ast.expr] = index.elts if isinstance(index, ast.Tuple) else [index]
    first = next((item for item in items if not _is_none(item)), None)
    return all(_is_none(item) or _is_plain_slice(item) for item in items) and (
        not isinstance(first, ast.Slice) or (first.lower is None and first.upper is None)
    )


def _is_none(item: ast.expr) -> bool:
    return isinstance(item, ast.Constant) and (item.value is None or item.value is Ellipsis)


def _is_plain_slice(item: ast.expr) -> bool:
    return isinstance(item, ast.Slice) and item.step is None


class PositionBiases(Mechanism):
    """Biases that are linear in the key's position."""

    def subscript(self, owner: Value, index: ast.expr, frame: Frame) -> Value | None:
        """A bias of fewer keys."""
        return owner if isinstance(owner, KeyBias) and keeps_heads(index) else None

    def binary(self, op: ast.operator, left: Value, right: Value) -> Value | None:
        """Slopes times keys, biases times numbers."""
        return combined(op, left, right)

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """Counted keys."""
        return counted(function, expr, args, frame)

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """Keys and biases in other shapes."""
        if isinstance(owner, KeyBias):
            if attr not in _SHAPES:
                raise Untranslatable(f"a bias of positions and its {attr}")
            return owner
        return (
            key_method(owner, attr, args)
            if isinstance(owner, Code) and owner.form == KEYS
            else None
        )
