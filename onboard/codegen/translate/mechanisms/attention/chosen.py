"""Choices of keys: modeling code makes masks of them, canonical ops take the positions of the keys
themselves.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.values import Code, Mask, Value

KIND = "block_indexer"


@dataclass(frozen=True, eq=False)
class Chosen(Code):
    """The keys that each query sees: positions [batch, queries, chosen] where modeling code has
    truth values.
    """


@dataclass(frozen=True, eq=False)
class Others(Value):
    """`~chosen`: true of the keys that a query does not see."""

    chosen: Chosen


@dataclass(frozen=True, eq=False)
class ChosenMask(Mask):
    """A causal mask that shows the chosen keys alone."""

    chosen: Chosen


def inverted(operator: ast.unaryop, operand: Value) -> Others | None:
    """Return `~chosen`; None for anything else."""
    return (
        Others(operand)
        if isinstance(operator, ast.Invert) and isinstance(operand, Chosen)
        else None
    )


def narrowed(mask: Mask, attr: str, args: Args) -> ChosenMask | None:
    """Return `mask.masked_fill(~chosen, least)`; None for anything else."""
    match args.positional:
        case [Others(chosen=chosen), _] if attr == "masked_fill" and type(mask) is Mask:
            return ChosenMask(chosen)
    return None


def indices(mask: object) -> Chosen | None:
    """Return what a mask shows of the keys; None where it shows all."""
    return mask.chosen if isinstance(mask, ChosenMask) else None


class ChosenKeys(Mechanism):
    """Attention to chosen keys."""

    def unary(self, op: ast.unaryop, operand: Value) -> Value | None:
        """The keys that are not chosen."""
        return inverted(op, operand)

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """A mask of those that are."""
        return narrowed(owner, attr, args) if isinstance(owner, Mask) else None
