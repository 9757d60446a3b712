"""The reference in float64: what both its own float32 and ours round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from onboard.graph.factory import default_dtype


class InFloat64(nn.Module):
    """A model whose weights are float64, run so that no step of its code goes back to float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if isinstance(model, PreTrainedModel):  # grouped products are of float32 and less
            model.set_experts_implementation("eager")
        self.model = model.double()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; new tensors are float64, too."""
        with default_dtype(torch.float64), _Widened():
            return self.model(*args, **kwargs)


class _Widened(TorchFunctionMode):
    """Takes float64 wherever code asks for float32."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        named = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*(_widened(value) for value in args), **named)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
