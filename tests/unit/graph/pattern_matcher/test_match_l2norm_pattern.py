from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.qwen3_next.modeling_qwen3_next import l2norm

from tests.support.graph.harness import transform, worst_error

KEY = "match_l2norm_pattern"


class _L2(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return l2norm(x, dim=-1, eps=1e-2)


class _MeanSquare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-2)


def _inputs(batch: int, sequence: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, sequence, 16)}


def test_scaling_to_length_one_is_matched() -> None:
    result = transform([KEY], _L2(), _inputs(2, 5))

    assert result.matches[KEY] == 1
    assert result.count(torch.ops.onboard.torch_l2norm) == 1
    assert result.count(torch.ops.aten.rsqrt) == 0
    assert worst_error(result, _L2(), _inputs) < 1e-6


def test_a_mean_of_squares_is_another_norm() -> None:
    assert transform([KEY], _MeanSquare(), _inputs(2, 5)).matches[KEY] == 0
