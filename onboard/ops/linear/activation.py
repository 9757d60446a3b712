"""Activation functions by the names that Hugging Face configs give them (`hidden_act`)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from onboard.config import suggest
from onboard.errors import UsageError

Activation = Callable[[Tensor], Tensor]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_new(x: Tensor) -> Tensor:
    # The same formula as `gelu_tanh`, but rounded after each step, as models trained with it were.
    return (
        0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
    )


def _gelu_fast(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu_squared(x: Tensor) -> Tensor:
    return torch.square(F.relu(x))


ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_fast": _gelu_fast,
    "gelu_new": _gelu_new,
    "gelu_pytorch_tanh": _gelu_tanh,
    "leaky_relu": F.leaky_relu,
    "linear": torch.clone,
    "mish": F.mish,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _relu_squared,
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}

KERNEL_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
"""Names of `ACTIVATIONS` that kernels know, and the formula that each stands for."""

_NUMBERS = {"silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4, "relu2": 5}
"""Of the formulas in CUDA C++ (`onboard/ops/cuda/common.cuh`)."""


def number_in_cuda(act: str) -> int:
    """Return the number of an activation that kernels know; of none 0."""
    return _NUMBERS[KERNEL_ACTIVATIONS[act]] if act else 0


def activation_function(name: str) -> Activation:
    """Return the activation of that name.

    Raises:
        UsageError: no activation has that name.
    """
    if name not in ACTIVATIONS:
        raise UsageError(f"there is no activation {name!r}", hint=suggest(name, ACTIVATIONS))
    return ACTIVATIONS[name]
