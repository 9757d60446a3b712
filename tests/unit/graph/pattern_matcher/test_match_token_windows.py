"""Windows of the last tokens, unfolded from a padded text, are tokens shifted again and again;
others are not.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.graph.harness import transform, worst_error

KEY = "match_token_windows"


class _Windows(nn.Module):
    """A convolution whose weights hang on the token; `pad` zeros stand before the text."""

    def __init__(self, size: int, pad: int, value: float = 0.0) -> None:
        super().__init__()
        self.size, self.pad, self.value = size, pad, value

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        context = F.pad(x.transpose(1, 2), (self.pad, 0), value=self.value)[
            ..., -(x.shape[1] + self.size - 1) :
        ]
        windows = context.unfold(-1, self.size, 1).flip(-1).transpose(1, 2)
        return (windows * weights[..., None, : self.size]).sum(-1)


def _inputs(batch: int, sequence: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, sequence, 6), "weights": torch.randn(batch, sequence, 4)}


@pytest.mark.parametrize("size", [2, 4])
def test_windows_are_shifted_tokens(size: int) -> None:
    model = _Windows(size, size - 1)
    result = transform([KEY], model, _inputs(2, 9))
    assert result.matches[KEY] == 1
    assert result.count(torch.ops.onboard.torch_token_shift) == size - 1
    assert result.count(torch.ops.aten.unfold) == 0
    assert worst_error(result, model, _inputs) < 1e-6


def test_windows_of_another_text_stay() -> None:
    assert transform([KEY], _Windows(3, 2, value=1.0), _inputs(2, 9)).matches[KEY] == 0
