"""What layers of a text leave at their classes for the layers behind them."""

from __future__ import annotations

import torch
from torch import nn

BETWEEN_LAYERS = "between_layers"
"""The parameter of generated blocks that has it: a dict, with a name for each class and attribute."""


def place_of(cls: type, attr: str) -> str:
    """Return the name in that dict of an attribute of a class."""
    return f"{cls.__name__}.{attr}"


def left_at_classes(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return what is left now at the classes of a module and of its parts."""
    return {
        place_of(cls, attr): value.clone()
        for cls in {type(part) for part in module.modules()}
        for attr, value in vars(cls).items()
        if isinstance(value, torch.Tensor)
    }
