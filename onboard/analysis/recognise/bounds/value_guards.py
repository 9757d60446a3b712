"""What code bounds or asks of tensors' values: a probe may never come to what it does then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CLIPS = {
    "clamp", "clamp_min", "clamp_max", "clip", "hardtanh", "threshold", "relu6", "nan_to_num",
    "sign", "round", "floor", "ceil", "trunc",
}  # fmt: skip
_LARGEST = {"maximum", "minimum", "fmax", "fmin", "max", "min", "amax", "amin"}
_ASKS = {
    "gt", "lt", "ge", "le", "eq", "ne", "greater", "less", "greater_equal", "less_equal", "isnan",
    "isinf", "isfinite", "bool", "item", "tolist", "equal", "allclose", "where", "masked_fill",
}  # fmt: skip
_NAMES = _CLIPS | _LARGEST | _ASKS


class Guards(TorchFunctionMode):
    """Counts the calls of functions that act upon some values alone, and questions what those are."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __enter__(self) -> Guards:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count a call, and make it."""
        name = getattr(func, "__name__", "").strip("_")
        asks_tensor = any(isinstance(each, torch.Tensor) for each in args)
        self.count += name in _NAMES and asks_tensor
        return func(*args, **(kwargs or {}))


def guarded(run: Callable[[], Any]) -> tuple[Any, bool]:
    """Return what something gives, and whether it bounds or asks what tensors hold on its way."""
    with Guards() as guards:
        return run(), guards.count > 0
