from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import repeat_kv

from tests.support.graph.harness import transform, worst_error

KEY = "match_repeat_kv"


class _HuggingFace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return repeat_kv(x.transpose(1, 2), 3)


class _Interleave(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.repeat_interleave(x.transpose(1, 2), 3, dim=-3)


class _TiledHeads(nn.Module):
    """[a, b] -> [a, b, a, b]: the heads in another order than attention groups them."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.transpose(1, 2)
        batch, kv_heads, sequence, size = heads.shape
        return (
            heads[:, None]
            .expand(batch, 3, kv_heads, sequence, size)
            .reshape(batch, -1, sequence, size)
        )


class _RepeatedTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.repeat_interleave(x.transpose(1, 2), 3, dim=2)


def _inputs(batch: int, sequence: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, sequence, 2, 8)}


@pytest.mark.parametrize(
    ("module", "matches"),
    [(_HuggingFace(), 1), (_Interleave(), 1), (_TiledHeads(), 0), (_RepeatedTokens(), 0)],
)
def test_only_heads_repeated_in_place_are_marked(module: nn.Module, matches: int) -> None:
    result = transform([KEY], module, _inputs(2, 5))

    assert result.matches[KEY] == matches
    assert result.count(torch.ops.onboard.torch_attention_repeat_kv) == matches
    assert worst_error(result, module, _inputs) == 0
