"""How an op gets into `torch.ops.onboard`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

NAMESPACE = "onboard"

_SOURCES: dict[str, str] = {}


def register_op(
    fake: Callable[..., Any] | None = None, *, mutates: tuple[str, ...] = (), schema: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register the decorated function as `torch.ops.onboard.<its name>`; the schema comes from its annotations.

    Args:
        fake: computes outputs of the right shape, dtype and strides from fake tensors. None: the function itself does,
            which is right for a composition of PyTorch operators that never reads a value.
        mutates: names of the arguments that the op writes to.
        schema: the schema where annotations cannot say it (an optional list of tensors), without the op's name.

    The function itself is returned, so that ops can be composed without a second trip through the dispatcher.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        op = torch.library.custom_op(f"{NAMESPACE}::{function.__name__}", function, mutates_args=mutates, schema=schema)
        op.register_fake(fake or function)
        _SOURCES[function.__name__] = function.__module__
        return function

    return register


def op_sources() -> dict[str, str]:
    """Return every registered op and the module that it comes from."""
    return dict(_SOURCES)
