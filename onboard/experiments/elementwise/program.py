"""Programs as text and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from xdsl.context import Context
from xdsl.dialects.builtin import Builtin
from xdsl.dialects.func import Func, FuncOp, ReturnOp
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.parser import Parser

from onboard.errors import OnboardError
from onboard.experiments.elementwise.dialect import DTYPES, EW, OPERATIONS, ConstantOp

_NAME = "pointwise"


def make_program(block: Block, results: Sequence[SSAValue]) -> FuncOp:
    """Return the function whose body is `block` and which returns `results`."""
    block.add_op(ReturnOp(*results))
    types = [argument.type for argument in block.args], [result.type for result in results]
    return FuncOp(_NAME, types, Region(block))


def return_only(program: FuncOp, positions: Sequence[int]) -> None:
    """Let a program return only those of its results."""
    block = program.body.block
    results = [results_of(program)[position] for position in positions]
    assert block.last_op is not None
    block.erase_op(block.last_op)
    block.add_op(ReturnOp(*results))
    program.update_function_type()  # type: ignore[no-untyped-call]


def results_of(program: FuncOp) -> list[SSAValue]:
    """Return what a program returns."""
    last = program.body.block.last_op
    assert isinstance(last, ReturnOp)
    return list(last.operands)


def steps(program: FuncOp) -> list[Operation]:
    """Return the operations of a program, constants included, in order."""
    return [each for each in program.body.block.ops if not isinstance(each, ReturnOp)]


def output_dtypes(program: FuncOp) -> list[torch.dtype]:
    """Return the dtypes of the tensors that a program computes."""
    return [DTYPES[result.type] for result in results_of(program)]


@lru_cache(maxsize=1024)
def parse_program(text: str) -> FuncOp:
    """Read a program that `str` printed; it must not be changed.

    Raises:
        OnboardError: the text is no program in the dialect `ew`.
    """
    context = Context()
    for dialect in (Builtin, Func, EW):
        context.load_dialect(dialect)
    try:
        program = Parser(context, text).parse_op()
        program.verify()
    except Exception as error:  # of many kinds, and each means the same
        raise OnboardError(
            f"not a pointwise program: {text[:80]!r} ({type(error).__name__})"
        ) from error
    if not isinstance(program, FuncOp) or not _is_pointwise(program):
        raise OnboardError(f"not a pointwise program: {text[:80]!r}")
    return program


def _is_pointwise(program: FuncOp) -> bool:
    """Whether there is one block, of the dialect's operations and types alone, and a return."""
    blocks = program.body.blocks
    if len(blocks) != 1 or not isinstance(blocks[0].last_op, ReturnOp):
        return False
    allowed = {*OPERATIONS.values(), ConstantOp}
    values = [*blocks[0].args, *(result for step in steps(program) for result in step.results)]
    return all(type(each) in allowed for each in steps(program)) and all(
        each.type in DTYPES for each in values
    )
