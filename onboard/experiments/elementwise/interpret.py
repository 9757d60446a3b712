"""Programs run with PyTorch's operators: what they mean, on any device and under tracing."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue

from onboard.experiments.elementwise.dialect import COMPARISONS, DTYPES, is_float, number
from onboard.experiments.elementwise.program import results_of, steps

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul")},
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "softplus": F.softplus,
    "row_sum": partial(torch.sum, dim=-1, keepdim=True),
    "row_mean": partial(torch.mean, dim=-1, keepdim=True),
}
"""Operations whose function has another name, or is not in `torch`."""

_NUMBER_COMES_SECOND = ("div", *COMPARISONS)


def evaluate(program: FuncOp, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Apply a program; each result has the shape that the operators give it, and may be one of the
    inputs.
    """
    values: dict[SSAValue, Any] = dict(zip(program.body.block.args, inputs, strict=True))
    for step in steps(program):
        values[step.results[0]] = _compute(step, [values[operand] for operand in step.operands])
    return [
        _tensor(values[result], DTYPES[result.type], inputs[0]) for result in results_of(program)
    ]


def evaluate_numbers(step: Operation, numbers: Sequence[float]) -> float:
    """Return the result of one operation on numbers, rounded to its type."""
    operands = zip(numbers, step.operands, strict=True)
    computed = _compute(
        step, [torch.tensor(value, dtype=DTYPES[operand.type]) for value, operand in operands]
    )
    value: float = computed.item()
    return value


def _compute(step: Operation, operands: list[Any]) -> Any:
    """Return one operation's tensor; a constant stays a number, as in the call that it comes
    from.
    """
    result, name = step.results[0], step.name.removeprefix("ew.")
    dtype = DTYPES[result.type]
    if name == "constant":
        return number(result)
    if all(_is_number(operand) for operand in operands):
        return evaluate_numbers(step, operands)
    if name == "cast":
        return operands[0].to(dtype)
    if name not in COMPARISONS and is_float(result.type):
        operands = [_widened(operand, dtype) for operand in operands]
    if name in ("maximum", "minimum", "where") or (
        name in _NUMBER_COMES_SECOND and _is_number(operands[0])
    ):
        operands = _tensors(operands, dtype)
    function = _FUNCTIONS.get(name) or getattr(torch, name)
    computed: Tensor = function(*operands)
    return computed.to(dtype)


def _widened(operand: Any, dtype: torch.dtype) -> Any:
    """Return a 16-bit operand of an operation whose result is wider, in which it computes."""
    narrow = isinstance(operand, Tensor) and operand.is_floating_point() and dtype == torch.float32
    return operand.to(dtype) if narrow else operand


def _is_number(value: Any) -> bool:
    return not isinstance(value, Tensor)


def _tensors(operands: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
    """Return the operands of a function that takes no numbers."""
    like = next(each for each in operands if isinstance(each, Tensor))
    return [_tensor(each, dtype, like) for each in operands]


def _tensor(value: Any, dtype: torch.dtype, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else like.new_full((), value, dtype=dtype)
