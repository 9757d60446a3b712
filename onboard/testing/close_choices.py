"""Choices that rounding decides: experts whose scores lie as near to each other as float32 tells.

A router takes the experts of the best scores. Where the last that is taken and the best of those
that are not differ by less than a comparison in float32 allows, another order of the same sums
takes the other one, and both are right. Such a text says nothing of what computed it, so that
another is drawn; the comparison must hold on one of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from onboard.testing.compare import MEASUREMENTS, NOTES
from onboard.verify.seeds import moved_seed
from onboard.verify.tolerances import SAME

DRAWS = 3
"""Texts that are tried at most."""

Parameters = ParamSpec("Parameters")


class CloseChoiceError(AssertionError):
    """A comparison failed on a text for which rounding decides the reference's own choices."""


class _Choices(TorchDispatchMode):
    """Counts the rows whose last chosen score is within rounding of the first that is left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.close = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.topk.default:
            self.close += _close(*args, **kwargs)
        elif func in (torch.ops.aten.argmax.default, torch.ops.aten.max.dim):
            scores, dim = (*args, kwargs.get("dim"))[:2]
            self.close += 0 if dim is None else _close(scores, 1, dim)
        return func(*args, **kwargs)


def _close(scores: torch.Tensor, k: int, dim: int = -1, largest: bool = True, *_: Any) -> int:
    """Return how many rows of `scores` have their `k`-th best value within rounding of the next."""
    if not scores.is_floating_point() or scores.dim() == 0 or not 0 < k < scores.shape[dim]:
        return 0
    best = scores.double().topk(k + 1, dim, largest).values
    gap = best.narrow(dim, k - 1, 1) - best.narrow(dim, k, 1)
    size = torch.where(scores.isfinite(), scores, 0.0).square().mean(dim, keepdim=True).sqrt()
    close = gap.abs() <= SAME * size  # of two that are masked, -inf, the gap is a NaN
    return int(close.sum())


@torch.no_grad()
def close_choices(model: nn.Module, *text: torch.Tensor, **told: Any) -> int:
    """Return how many of a model's choices, running on a text, are decided by rounding."""
    with _Choices() as choices:
        model(*text, **told)
    return int(choices.close)


@contextmanager
def told_of(close: Callable[[], int]) -> Iterator[None]:
    """Have a failure say so where `close` counts choices that rounding decides."""
    try:
        yield
    except AssertionError as error:
        if count := close():
            message = f"{error}; rounding decides {count} of the reference's own choices here"
            raise CloseChoiceError(message) from None
        raise


def on_clear_texts(test: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Have a test draw other texts where rounding decides what it compares, and note that."""

    @functools.wraps(test)
    def tried(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        __tracebackhide__ = True
        for draw in range(DRAWS):
            try:
                with moved_seed(draw):
                    test(*args, **kwargs)
                return
            except CloseChoiceError as error:
                if draw == DRAWS - 1:
                    raise
                MEASUREMENTS.clear()
                NOTES.append(f"other texts were drawn: {error}")

    return tried
