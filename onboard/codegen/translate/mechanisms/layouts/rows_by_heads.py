"""Tables that code multiplies with tensors of heads as they are: rows [sequence, dim] with queries
[batch, heads, sequence, dim]. Generated code has the batch in front of the rows, and heads there get
a dimension of their own.
"""

from __future__ import annotations

import ast
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from onboard.analysis.tiny.tiny_prompts import from_zero, prompt, vocabulary
from onboard.codegen.translate.language.forms import ROWS
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.trees.syntax import attribute, call
from onboard.codegen.translate.language.values import Code, Value
from onboard.hf.copied_model import copied

_LENGTH = 19
"""Tokens: a number that no size of a small model is."""
_RANKS: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The numbers of dimensions of what rows [sequence, dim] are multiplied with."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ranks: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket is torch.ops.aten.mul and len(args) == 2:
            self._note(*args)
            self._note(*reversed(args))
        return func(*args, **(kwargs or {}))

    def _note(self, table: object, other: object) -> None:
        both = isinstance(table, torch.Tensor) and isinstance(other, torch.Tensor)
        if not both or table.dim() != 2 or other.dim() < 3:  # type: ignore[attr-defined]
            return
        if table.shape[0] == other.shape[-2] == _LENGTH != table.shape[1]:  # type: ignore[attr-defined]
            self.ranks.add(other.dim())  # type: ignore[attr-defined]


class RowsByHeads(Mechanism):
    """`queries * cos[:length]`."""

    def binary(self, op: ast.operator, left: Value, right: Value, frame: Frame) -> Value | None:
        """Rows, with a dimension for heads, and another tensor."""
        if not isinstance(op, ast.Mult) or not frame.translator.specialised:
            return None
        if not _is_of_heads(left, right) and not _is_of_heads(right, left):
            return None
        if _ranks(frame.translator.model) != {4}:
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


def _ranks(model: nn.Module) -> frozenset[int]:
    """Return the numbers of dimensions of what a model multiplies rows of tables with."""
    if model not in _RANKS:
        inputs = from_zero(prompt(0, length=_LENGTH, seed=3, tokens=vocabulary(model)))
        try:
            with torch.no_grad(), _Products() as found:
                copied(model)(**inputs, use_cache=False)
            _RANKS[model] = frozenset(found.ranks)
        except Exception:  # a small model may take no text of that length
            _RANKS[model] = frozenset()
    return _RANKS[model]
