"""Tables that code multiplies with tensors of heads as they are: rows [sequence, dim] with queries
[batch, heads, sequence, dim]. Generated code has the batch in front of the rows, and heads there get
a dimension of their own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import torch

from onboard.codegen.translate.language.forms import ROWS
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.trees.syntax import attribute, call
from onboard.codegen.translate.language.values import Code, Value
from onboard.codegen.translate.mechanisms.layouts.seen_ranks import LENGTH, seen_ranks


class RowsByHeads(Mechanism):
    """`queries * cos[:length]`."""

    def binary(self, op: ast.operator, left: Value, right: Value, frame: Frame) -> Value | None:
        """Rows, with a dimension for heads, and another tensor."""
        if not isinstance(op, ast.Mult) or not frame.translator.specialised:
            return None
        if not _is_of_heads(left, right) and not _is_of_heads(right, left):
            return None
        if seen_ranks(frame.translator.model, _of_products) != {4}:
            return None
        return Code(ast.BinOp(_beside_heads(left), op, _beside_heads(right)))


def _is_of_heads(rows: Value, other: Value) -> bool:
    """Whether a value is a table's rows, and another one a tensor that may have heads."""
    of_rows = isinstance(rows, Code) and rows.form == ROWS
    return of_rows and isinstance(other, Code) and not other.static and other.form != ROWS


def _beside_heads(value: Value) -> ast.expr:
    if isinstance(value, Code) and value.form == ROWS:
        return call(attribute(value.code(), "unsqueeze"), ast.Constant(1))
    return value.code()


def _of_products(function: Any, args: Any) -> Iterator[int]:
    """Yield the numbers of dimensions of what rows [sequence, dim] are multiplied with."""
    if function is not torch.ops.aten.mul or len(args) != 2:
        return
    for table, other in (args, reversed(args)):
        both = isinstance(table, torch.Tensor) and isinstance(other, torch.Tensor)
        if not both or table.dim() != 2 or other.dim() < 3:
            continue
        if table.shape[0] == other.shape[-2] == LENGTH != table.shape[1]:
            yield other.dim()
