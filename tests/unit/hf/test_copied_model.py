"""Copies of models whose modules keep what Python does not copy."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import nn

from onboard.hf.copied_model import copied


class _Keeping(nn.Module):
    """Keeps what it found out of its layer when it first ran."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.lazily: object = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.lazily = self.lazily or inspect.signature(self.layer.forward).parameters
        return self.layer(x)


@pytest.mark.parametrize("kept", ["parameters of a signature", "a module of Python"])
def test_a_model_that_keeps_what_has_no_copy_is_copied(kept: str) -> None:
    model, x = _Keeping(), torch.randn(2, 3)
    if kept == "a module of Python":
        model.lazily = math
    expected = model(x)
    other = copied(model)
    assert other.lazily is model.lazily
    with torch.no_grad():
        model.layer.weight.zero_()
    assert torch.equal(other(x), expected)
