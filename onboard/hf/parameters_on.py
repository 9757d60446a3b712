"""Where the parameters of a module are put while it is made: its buffers keep their real values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def parameters_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Put parameters on `device` in `dtype` as soon as a module registers them; leave buffers
    alone.

    Freshly made CPU tensors have no pages of memory yet, so building a large model on "meta" costs
    neither memory nor time. Buffers (RoPE tables) get their real values, which a model built wholly
    on "meta" would lose.
    """
    original, reset = nn.Module.register_parameter, nn.Linear.reset_parameters

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, _moved(param, device, dtype) if param is not None else None)

    setattr(nn.Module, "register_parameter", register)  # noqa: B010  (mypy refuses a plain assignment)
    # Half of the time that many experts take goes into random numbers for no memory
    if device.type == "meta":
        setattr(nn.Linear, "reset_parameters", lambda linear: None)  # noqa: B010
    try:
        yield
    finally:
        setattr(nn.Module, "register_parameter", original)  # noqa: B010
        setattr(nn.Linear, "reset_parameters", reset)  # noqa: B010


@contextmanager
def without_memory(*, computing: bool) -> Iterator[None]:
    """Make modules whose parameters have shapes and no memory.

    With `computing` buffers and whatever constructors compute on the way have values, as code needs
    that no one has written for the meta device.
    """
    meta = torch.device("meta")
    with parameters_on(meta, torch.float32) if computing else meta:
        yield


def _moved(param: nn.Parameter, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    dtype = dtype if param.is_floating_point() else param.dtype
    if param.device.type == device.type and param.dtype == dtype:
        return param  # the same object: tied parameters stay tied
    return nn.Parameter(param.detach().to(device=device, dtype=dtype), requires_grad=False)
