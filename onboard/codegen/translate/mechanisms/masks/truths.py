"""Masks that code makes step by step: buffers that are one, masks of ones and zeros, or of truth
values, that are compared, and masks that are filled where these say so.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any

import torch

from onboard.analysis.recognise.mask_makers import FAR_BELOW
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.forms import TRIANGLE, ZEROS
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.state import ClassState
from onboard.codegen.translate.language.values import Code, Items, Known, Mask, Value
from onboard.codegen.translate.mechanisms.attention.causal import (
    Drawn,
    DrawnHidden,
    DrawnSeen,
    Hidden,
    Seen,
    is_least,
)


class Truths(Mechanism):
    """`self.mask`, `mask == 0`, `mask.masked_fill(mask == 0, least)`."""

    def own_attribute(
        self, cls: ClassState, attr: str, path: ast.expr, frame: Frame
    ) -> Value | None:
        """A buffer that hides later keys, or is added to scores for that."""
        if frame.kind != "forward" or not frame.translator.specialised:
            return None
        kept = [module._buffers.get(attr) for module in frame.translator.modules_of(cls.cls)]
        kinds = {None if buffer is None else _kind(buffer) for buffer in kept}
        kind = kinds.pop() if len(kinds) == 1 else None
        return None if kind is None else kind(path)

    def unary(self, op: ast.unaryop, operand: Value) -> Value | None:
        """What a buffer does not show it hides."""
        match operand:
            case Code(form=str() as form, expr=expr) if form == TRIANGLE:
                return DrawnHidden(ast.UnaryOp(op, expr)) if isinstance(op, ast.Invert) else None
        return None

    def compare(self, op: ast.cmpop, left: Value, right: Value) -> Value | None:
        """What a mask of ones is compared with; where one that is added is not zero, it hides."""
        if not isinstance(op, ast.Eq | ast.NotEq) or not isinstance(right, Known):
            return None
        if isinstance(left, Code) and left.form == TRIANGLE:
            left = DrawnSeen(left.expr)
        if isinstance(left, Seen | Hidden):
            return _compared(op, left, right)
        hides = type(left) is Mask and isinstance(op, ast.NotEq) and right.equals(Known(0))
        return Hidden() if hides else None

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """A mask behind that of what was before the text, which is nothing."""
        match args.positional:
            case [Items(items=(Code(form=str() as form) as before, Mask() as mask)), *_] if (
                form == ZEROS and function in (torch.hstack, torch.cat) and _is_empty(before.expr)
            ):
                return mask
        return None

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """A mask that is added, made of one of ones."""
        if attr not in ("masked_fill", "masked_fill_") or len(args.positional) != 2:
            return None
        where, number = args.positional
        match owner, where:
            case Seen() | Hidden(), Hidden() if is_least(number.code()):
                return Mask()  # what it adds to the keys that are seen is the same for all
            case Mask(), Seen() if type(owner) is Mask and isinstance(number, Known):
                return owner
        return None


def _compared(op: ast.cmpop, mask: Seen | Hidden, other: Known) -> Mask | None:
    """Return the mask of truth values that `mask op other` is."""
    if other.value not in (0, 1):
        return None
    sees = isinstance(mask, Seen) is (isinstance(op, ast.Eq) is bool(other.value))
    if isinstance(mask, Drawn):
        compared = ast.Compare(mask.expr, [op], [other.code()])
        return DrawnSeen(compared) if sees else DrawnHidden(compared)
    return Seen() if sees else Hidden()


@lru_cache(maxsize=64)
def _kind(buffer: torch.Tensor) -> type[Drawn] | None:
    """Return what a buffer [.., rows, rows] is as a mask; None for none."""
    rows = buffer.shape[-1] if buffer.dim() > 1 else 0
    if rows < 2 or buffer.shape[-2] != rows or buffer.numel() != rows * rows:
        return None
    buffer = buffer.reshape(rows, rows)
    later = torch.ones_like(buffer, dtype=torch.bool).triu(1)
    if torch.equal(buffer, later.to(buffer.dtype)):
        return DrawnHidden
    is_added = buffer.is_floating_point() and bool((buffer[~later] == 0).all())
    return Drawn if is_added and bool((buffer[later] <= FAR_BELOW).all()) else None


def _is_empty(zeros: ast.expr) -> bool:
    """Whether `torch.zeros((queries, 0))` has no keys."""
    match zeros:
        case ast.Call(args=[ast.Tuple(elts=[*_, last]) | ast.List(elts=[*_, last]), *_]):
            return isinstance(last, ast.Constant) and last.value == 0
        case ast.Call(args=[*_, last]):
            return isinstance(last, ast.Constant) and last.value == 0
    return False
