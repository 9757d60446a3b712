"""Whether the canonical op computes what a core computes, in float64 to nine digits."""

from __future__ import annotations

import torch
from torch import Tensor

import onboard.ops  # noqa: F401 - registers the ops
from onboard.codegen.cores.core_runs import Core, CutAxes, Dims, NotAttentionError
from onboard.codegen.cores.meaning import Meaning, Operands

_DIGITS = 1e-9
_SIZES = (0.1, 20.0, 600.0)
"""The largest scores of a run: what is linear, what softmax makes narrow, and what a bound would cut,
but smaller than the finite numbers by which masks forbid keys."""


def check(
    core: Core, axes: CutAxes, meaning: Meaning, dims: list[Dims], bounds: set[float]
) -> None:
    """Raise `NotAttentionError` for the first operands for which both differ; `bounds` are sizes of
    scores to be exceeded.
    """
    sizes = [*_SIZES, *(4 * each for each in sorted(bounds) if 2 * each > _SIZES[-1])]
    for index, each in enumerate(dims):
        for place, size in enumerate(sizes):
            drawn = Operands.random(axes, each, seed=100 + 10 * index + place)
            operands = drawn.of_size(size, meaning.scale)
            actual = core(each, axes, operands.query, operands.key, operands.value)
            error = _error(actual, canonical(operands, meaning))
            if not error <= _DIGITS:
                raise NotAttentionError(
                    f"it is not what the canonical op computes (error {error:.1e} "
                    f"for {each[1]} tokens and scores up to {size:g})"
                )


def canonical(operands: Operands, meaning: Meaning) -> Tensor:
    """Return the canonical op's result [batch, heads, positions, channels]."""
    settings = (meaning.scale, meaning.sinks, meaning.window, meaning.cap)
    result: Tensor = torch.ops.onboard.torch_attention(
        *(operands.query, operands.key, operands.value),
        *(None, 0.0, True, *settings, "bnsd", meaning.slopes, meaning.chunk),
    )
    return result


def _error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())
