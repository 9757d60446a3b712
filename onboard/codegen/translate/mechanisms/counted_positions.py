"""Positions that transformers counts: `position_ids` in generated code."""

from __future__ import annotations

import ast
from typing import Any

import torch

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.forms import KEYS, POSITIONS
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.trees.syntax import name
from onboard.codegen.translate.language.values import Code, Known, Value


class CountedPositions(Mechanism):
    """`torch.arange(sequence)` in a model that counts positions by itself."""

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """Positions for `torch.arange([0,] length)` of a length that is known at run time only."""
        match args.positional:
            case [Code(static=False)] | [Known(value=0), Code(static=False)] if (
                function is torch.arange
            ):
                return positions(frame)
        return None


def positions(frame: Frame) -> Code | None:
    """Return what stands for counted positions.

    A forward that does not get `position_ids` is given them by its callers, see `Translator`.
    """
    program = frame.translator
    if frame.kind != "forward" or not program.counts_positions or program.writes_positions:
        return None
    return Code(name("position_ids"), form=KEYS if program.findings.alibi else POSITIONS)
