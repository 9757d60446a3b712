"""Modules that run, and whose results nothing reads: heads that only training has, say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn

from onboard.analysis.recognise.recorder import mapped


@torch.no_grad()
def is_idle(model: nn.Module, path: str, inputs: Mapping[str, torch.Tensor]) -> bool:
    """Whether a transformers model gives the same logits when all floats that one of its modules
    gives are not numbers, also to code that calls its forward by name.
    """
    expected = model(**inputs, use_cache=False).logits
    module = model.get_submodule(path)
    forward = module.forward
    with mock.patch.dict(
        vars(module), {"forward": lambda *a, **k: mapped(_spoilt, forward(*a, **k))}
    ):
        return torch.equal(model(**inputs, use_cache=False).logits, expected)


def _spoilt(item: Any) -> Any:
    floats = isinstance(item, torch.Tensor) and item.is_floating_point()
    return torch.full_like(item, torch.nan) if floats else item
