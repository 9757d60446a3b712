"""Simplifies programs without changing one bit of what they compute; `widen` does change bits."""

from __future__ import annotations

import torch
from xdsl.dialects.builtin import f32
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.pattern_rewriter import (
    GreedyRewritePatternApplier,
    PatternRewriter,
    PatternRewriteWalker,
    RewritePattern,
)
from xdsl.rewriter import Rewriter
from xdsl.transforms.common_subexpression_elimination import cse
from xdsl.transforms.dead_code_elimination import region_dce

from onboard.experiments.elementwise.dialect import (
    COMPARISONS,
    DTYPES,
    LOGIC,
    CastOp,
    ConstantOp,
    constant,
    is_float,
    number,
    operation,
)
from onboard.experiments.elementwise.interpret import evaluate_numbers
from onboard.experiments.elementwise.program import steps

_EXACT = {
    "abs",
    "neg",
    "add",
    "sub",
    "mul",
    "div",
    "sqrt",
    "maximum",
    "minimum",
    "relu",
    "cast",
    *COMPARISONS,
    *LOGIC,
}
"""Operations that every device computes to the same bit."""

_WIDER = {
    torch.bool: {torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32},
    torch.int32: {torch.int64},
    torch.float16: {torch.float32},
    torch.bfloat16: {torch.float32},
}
"""dtype -> those that hold all of its values."""


def canonicalize(program: FuncOp) -> None:
    """Fold constants, drop casts and operations that change nothing, compute nothing twice, drop
    what nobody reads.
    """
    patterns = GreedyRewritePatternApplier([_FoldConstants(), _SimplifyCasts(), _DropIdentities()])
    PatternRewriteWalker(patterns).rewrite_region(program.body)
    cse(program)
    region_dce(program.body)


def widen(program: FuncOp) -> None:
    """Keep everything between the operations in f32, so that nothing but the results is rounded to
    16 bits.
    """
    last = program.body.block.last_op
    assert isinstance(last, ReturnOp)
    kinds = [result.type for result in last.operands]
    for step in steps(program):
        if is_float(step.results[0].type) and not isinstance(step, ConstantOp):
            Rewriter.replace_value_with_new_type(step.results[0], f32)
    for position, (result, kind) in enumerate(zip(last.operands, kinds, strict=True)):
        if result.type != kind:
            rounded = operation("cast", [result], kind)
            program.body.block.insert_op_before(rounded, last)
            last.operands[position] = rounded.results[0]
    canonicalize(program)


class _FoldConstants(RewritePattern):
    """An operation on numbers alone is a number."""

    def match_and_rewrite(self, op: Operation, rewriter: PatternRewriter) -> None:
        """Replace one operation."""
        numbers = [value for operand in op.operands if (value := number(operand)) is not None]
        if (
            op.operands
            and len(numbers) == len(op.operands)
            and op.name.removeprefix("ew.") in _EXACT
        ):
            rewriter.replace_op(op, constant(evaluate_numbers(op, numbers), op.results[0].type))


class _SimplifyCasts(RewritePattern):
    """A cast to the same type is nothing, and one through a type that loses nothing goes
    straight.
    """

    def match_and_rewrite(self, op: Operation, rewriter: PatternRewriter) -> None:
        """Replace one cast."""
        if not isinstance(op, CastOp):
            return
        inner = op.operand.owner
        if op.operand.type == op.result.type:
            rewriter.replace_op(op, [], [op.operand])
        elif isinstance(inner, CastOp) and _loses_nothing(inner.operand.type, inner.result.type):
            rewriter.replace_op(op, operation("cast", [inner.operand], op.result.type))


def _loses_nothing(narrow: Attribute, wide: Attribute) -> bool:
    return DTYPES[wide] in _WIDER.get(DTYPES[narrow], set())


class _DropIdentities(RewritePattern):
    """x * 1, x / 1, -(-x), and a choice between equals, are x."""

    def match_and_rewrite(self, op: Operation, rewriter: PatternRewriter) -> None:
        """Replace one operation."""
        same = _same_value(op)
        if same is not None and same.type == op.results[0].type:
            rewriter.replace_op(op, [], [same])


def _same_value(op: Operation) -> SSAValue | None:
    """Return the operand that an operation returns as it is, if it does."""
    name, operands = op.name.removeprefix("ew."), op.operands
    if name in ("mul", "div") and number(operands[1]) == 1:
        return operands[0]
    if name == "mul" and number(operands[0]) == 1:
        return operands[1]
    if (
        name == "neg"
        and isinstance(inner := operands[0].owner, Operation)
        and inner.name == op.name
    ):
        return inner.operands[0] if inner.results[0].type == op.results[0].type else None
    return operands[1] if name == "where" and operands[1] is operands[2] else None
