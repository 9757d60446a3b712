"""Zeros before the text and the convolutions that use them up become the canonical op, whatever
biases they have.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.graph.harness import randomize, transform, worst_error

KEY = "match_padded_convolution"
CHANNELS = 6


class _Convolutions(nn.Module):
    """`zeros` before and after the text, then convolutions of `kernels`, the second of dilation 2,
    all biased.
    """

    def __init__(
        self, kernels: tuple[int, ...], zeros: tuple[int, int], value: float = 0.0
    ) -> None:
        super().__init__()
        groups = (CHANNELS, 2, 1)
        made = [
            nn.Conv1d(CHANNELS, CHANNELS, kernel, groups=groups[index], dilation=1 + index % 2)
            for index, kernel in enumerate(kernels)
        ]
        self.convolutions, self.zeros, self.value = nn.Sequential(*made), zeros, value
        randomize(self, seed=int(torch.randint(1 << 30, ())))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x.transpose(1, 2), self.zeros, value=self.value)
        return self.convolutions(padded).transpose(1, 2)


def _inputs(batch: int, sequence: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, sequence, CHANNELS)}


@pytest.mark.parametrize(("kernels", "left"), [((4,), 3), ((2, 3), 5), ((3, 2, 2), 5)])
def test_convolutions_that_use_up_the_zeros_become_the_op(
    kernels: tuple[int, ...], left: int
) -> None:
    model = _Convolutions(kernels, (left, 0))
    result = transform([KEY], model, _inputs(2, 9))
    assert (
        result.matches[KEY] == result.count(torch.ops.onboard.torch_causal_conv1d) == len(kernels)
    )
    assert result.count(torch.ops.aten.pad) == 0
    assert worst_error(result, model, _inputs) < 1e-5


@pytest.mark.parametrize(
    "model",
    [
        _Convolutions((4,), (2, 1)),
        _Convolutions((4,), (2, 0)),
        _Convolutions((2,), (1, 0), value=1.0),
    ],
)
def test_other_padding_stays(model: nn.Module) -> None:
    assert transform([KEY], model, _inputs(2, 9)).matches[KEY] == 0
