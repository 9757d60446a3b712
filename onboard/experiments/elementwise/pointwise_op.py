"""A subgraph of elementwise operators as one op: the reference of the generated kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onboard.ops.library import register_op


def common_shape(inputs: Sequence[Tensor]) -> list[int]:
    """Return the shape that tensors broadcast to; a symbolic size is taken to be the others' where
    they are not 1.
    """
    rank = max(x.dim() for x in inputs)
    sizes = [[x.shape[dim] for x in inputs if x.dim() >= -dim] for dim in range(-rank, 0)]
    return [
        next((size for size in each if not (isinstance(size, int) and size == 1)), 1)
        for each in sizes
    ]


def empty_results(inputs: list[Tensor], program: str) -> list[Tensor]:
    """Return empty contiguous tensors for what a program computes."""
    from onboard.experiments.elementwise.program import output_dtypes, parse_program

    shape = common_shape(inputs)
    return [
        inputs[0].new_empty(shape, dtype=dtype) for dtype in output_dtypes(parse_program(program))
    ]


@register_op(empty_results, inserted=True)
def torch_pointwise(inputs: list[Tensor], program: str) -> list[Tensor]:
    """Apply a program in the dialect `ew` (`onboard.experiments.elementwise`) to each element.

    Args:
        inputs: tensors of the dtypes that the program declares; their shapes broadcast to one.
        program: the function, as MLIR text.

    Returns:
        One contiguous tensor of the common shape for each value that the program returns.

    Raises:
        OnboardError: the text is no such program.
    """
    from onboard.experiments.elementwise.interpret import evaluate
    from onboard.experiments.elementwise.program import parse_program

    results = evaluate(parse_program(program), inputs)
    empty = empty_results(inputs, program)
    return [torch.Tensor.copy_(out, result) for out, result in zip(empty, results, strict=True)]
