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

from onboard.analysis.recognise.position_biases import deviation
from onboard.codegen.translate.language.args import Args, plain_call
from onboard.codegen.translate.language.forms import KEYS, QUERIES, ZEROS
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.state import ClassState
from onboard.codegen.translate.language.trees.syntax import (
    Untranslatable,
    attribute,
    call,
    same_code,
)
from onboard.codegen.translate.language.values import Code, Known, Mask, Value
from onboard.codegen.translate.mechanisms.attention.causal import Windowed
from onboard.verify.tolerances import SAME


@dataclass(frozen=True, eq=False)
class KeyBias(Code):
    """A bias of attention that is linear in the key's position (ALiBi); `expr`, its slopes, is what
    is left of it.
    """

    causal: bool = False
    """A causal mask was added to it."""
    unread = "a bias of positions that more than attention reads"
    typed = True
    returned = True
    annotation = "AlibiSlopes"

    def same_fact(self, other: Value) -> bool:
        """Whether both are masked or neither is."""
        return isinstance(other, KeyBias) and self.causal == other.causal


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
_MOVES = {*_SHAPES, "transpose"}
_ROUNDS = {"half", "bfloat16"}


def counted(obj: Any, expr: ast.expr, args: Args, frame: Frame) -> Code | None:
    """Return `torch.arange(...)` of a number of keys that the config says, in steps of one."""
    if obj is not torch.arange or not frame.translator.findings.alibi or len(args.positional) > 2:
        return None
    if frame.kind == "init":
        return None  # a table of them is what `own_attribute` knows
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
    """Return slopes times counted keys, a bias times a number, and one to which a causal mask, or
    zeros, are added; None for anything else.
    """
    for one, other in ((left, right), (right, left)):
        if isinstance(one, KeyBias) and isinstance(operator, ast.Add):
            if isinstance(other, Mask) and not isinstance(other, Windowed):
                return replace(one, causal=True)
            if isinstance(other, Code) and other.form == ZEROS:
                return one
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


def shifted(operator: ast.operator, left: Value, right: Value) -> Code | None:
    """Return counted keys and what is the same for all keys of a query added to them, or taken
    away: they go up by one as before.
    """
    if not _is_keys(left) or not isinstance(operator, ast.Add | ast.Sub):
        return None
    assert isinstance(left, Code)
    if not (right.is_static or _is_of_query(left, right)) or isinstance(right, Mask):
        return None
    return replace(left, expr=ast.BinOp(left.expr, operator, right.code()))


def _is_of_query(keys: Code, value: Value) -> bool:
    """Whether a value is the same for all keys of a query: it counts queries, or how many keys
    were counted.
    """
    if not isinstance(value, Code):
        return False
    ends = [
        end
        for item in ast.walk(keys.expr)
        if isinstance(item, ast.Call) and ast.unparse(item.func) == "torch.arange"
        for end in item.args
    ]
    return value.form == QUERIES or any(same_code(value.expr, end) for end in ends)


def _moved(bias: KeyBias, args: Args) -> KeyBias:
    """Return a bias where another tensor lies; the dtype it stays in is its own."""
    for item in (*args.positional, *args.keywords.values()):
        if not isinstance(item, Code) or item.static:
            continue
        is_device = isinstance(item.expr, ast.Attribute) and item.expr.attr == "device"
        if is_device or (len(args.positional) == 1 and type(item) is Code and not _is_dtype(item)):
            device = item.expr if is_device else attribute(item.expr, "device")
            return replace(bias, expr=call(attribute(bias.expr, "to"), device))
    return bias


def _is_dtype(value: Code) -> bool:
    match value.expr:
        case ast.Attribute(attr=attr):
            return attr == "dtype"
        case ast.Name(id=variable):
            return "dtype" in variable
    return False


def _is_linear(table: torch.Tensor | None) -> bool:
    """Whether a buffer is a table of biases, one row a head."""
    if table is None or table.dim() != 3 or table.shape[1] != 1:
        return False
    error = deviation(table)
    return error is not None and error <= SAME


def _of_key(table: ast.expr, number: int) -> ast.expr:
    index = ast.Tuple([ast.Constant(...), ast.Constant(number)], ast.Load())
    return ast.Subscript(table, index, ast.Load())


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
    return all(_is_none(item) or _is_plain_slice(item) for item in items) and _is_whole(
        next((item for item in items if not _is_none(item)), None)
    )


def _is_behind_heads(index: ast.expr) -> bool:
    """Whether an index, `..., queries, keys`, is of a bias's last dimensions alone."""
    match index:
        case ast.Tuple(elts=[ast.Constant(value=value), *last]) if value is ...:
            return len(last) <= 2 and all(map(_is_plain_slice, last))
    return False


def _is_whole(heads: ast.expr | None) -> bool:
    """Whether an index takes all heads: it has no bounds, or ends with a number of the module's."""
    if not isinstance(heads, ast.Slice):
        return True
    return heads.lower is None and isinstance(heads.upper, ast.Attribute | None)


def _is_none(item: ast.expr) -> bool:
    return isinstance(item, ast.Constant) and (item.value is None or item.value is Ellipsis)


def _is_plain_slice(item: ast.expr) -> bool:
    return isinstance(item, ast.Slice) and item.step is None


class PositionBiases(Mechanism):
    """Biases that are linear in the key's position."""

    def own_attribute(
        self, cls: ClassState, attr: str, path: ast.expr, frame: Frame
    ) -> Value | None:
        """A table of them, [heads, 1, keys], of which the slopes are the steps."""
        if not frame.translator.findings.alibi or frame.kind == "init":
            return None
        tables = [
            dict(module.named_buffers(recurse=False)).get(attr)
            for module in frame.translator.modules_of(cls.cls)
        ]
        if not tables or not all(map(_is_linear, tables)):
            return None
        first, second = (_of_key(path, number) for number in (0, 1))
        return KeyBias(call(attribute(ast.BinOp(second, ast.Sub(), first), "flatten")))

    def subscript(self, owner: Value, index: ast.expr, frame: Frame) -> Value | None:
        """A bias of fewer keys."""
        kept = keeps_heads(index) or _is_behind_heads(index)
        return owner if isinstance(owner, KeyBias) and kept else None

    def binary(self, op: ast.operator, left: Value, right: Value, frame: Frame) -> Value | None:
        """Slopes times keys, biases times numbers."""
        return combined(op, left, right) or shifted(op, left, right)

    def item(self, owner: Value, index: Value, node: ast.Subscript, frame: Frame) -> Value | None:
        """Counted keys of one head."""
        if isinstance(owner, Code) and _is_keys(owner) and isinstance(index, Known):
            return Code(ast.Subscript(owner.expr, index.code(), ast.Load()), form=KEYS)
        return None

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """Counted keys, and those of the diagonal: the queries' own."""
        match args.positional:
            case [Code(form=str() as form)] if function is torch.diag and form == KEYS:
                return replace(plain_call(expr, args), form=QUERIES)
        return counted(function, expr, args, frame)

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """Keys and biases in other shapes."""
        if isinstance(owner, Code) and owner.form == ZEROS and attr == "add":
            return combined(ast.Add(), owner, args.positional[0]) if args.positional else None
        if isinstance(owner, Code) and owner.form == QUERIES and attr in _MOVES:
            return replace(plain_call(attribute(owner.expr, attr), args), form=QUERIES)
        if isinstance(owner, KeyBias):
            if attr not in _SHAPES:
                raise Untranslatable(f"a bias of positions and its {attr}")
            return _moved(owner, args) if attr == "to" else owner
        return (
            key_method(owner, attr, args)
            if isinstance(owner, Code) and owner.form == KEYS
            else None
        )
