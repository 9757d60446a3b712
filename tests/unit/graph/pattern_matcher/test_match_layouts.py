from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from onboard.graph.fx import arguments, nodes_of
from tests.support.graph.harness import transform, worst_error

ROPE = torch.ops.onboard.torch_rope_with_explicit_cos_sin
ATTENTION = torch.ops.onboard.torch_attention


class _Block(nn.Module):
    """What plain graphs look like after matching: everything with heads before sequence."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
        query, key = ROPE(query, key, cos, sin, 1)
        output = ATTENTION(query, key, value, layout="bnsd")
        return output.transpose(1, 2).contiguous().reshape(q.shape[0], q.shape[1], -1)


def _inputs(batch: int, sequence: int) -> dict[str, Tensor]:
    heads = {
        name: torch.randn(batch, sequence, count, 8)
        for name, count in (("q", 4), ("k", 2), ("v", 2))
    }
    angles = torch.randn(batch, sequence, 4).repeat(1, 1, 2)
    return {**heads, "cos": angles.cos(), "sin": angles.sin()}


def test_layouts_are_unified_and_all_transposes_vanish() -> None:
    keys = ["match_attention_layout", "match_rope_layout", "eliminate_redundant_transposes"]
    result = transform(keys, _Block(), _inputs(2, 5))

    assert result.matches["match_attention_layout"] == 1
    assert result.matches["match_rope_layout"] == 1
    assert result.matches["eliminate_redundant_transposes"] > 0
    assert result.count(torch.ops.aten.transpose) == 0
    assert arguments(nodes_of(result.gm, ATTENTION)[0])["layout"] == "bsnd"
    assert arguments(nodes_of(result.gm, ROPE)[0])["unsqueeze_dim"] == 2
    assert worst_error(result, _Block(), _inputs) < 1e-6


def test_the_other_layout_can_be_asked_for() -> None:
    overrides = {
        "match_attention_layout": {"attn_layout": "bnsd"},
        "match_rope_layout": {"expected_layout": "bnsd"},
    }
    result = transform(overrides, _Block(), _inputs(2, 5), **overrides)

    assert result.matches["match_attention_layout"] == 0
    assert result.matches["match_rope_layout"] == 0
    assert result.count(torch.ops.aten.transpose) == 4


@pytest.mark.parametrize(
    ("dims", "left"),
    [
        (((1, 2), (1, 2)), 0),
        (((1, 2), (2, 1)), 0),
        (((1, -2), (2, 1)), 0),
        (((1, 2), (2, 3)), 2),
        (((0, 1), (1, 2)), 2),
    ],
)
def test_only_inverse_transposes_cancel(
    dims: tuple[tuple[int, int], tuple[int, int]], left: int
) -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.transpose(*dims[0]).contiguous().transpose(*dims[1]) * 2

    def inputs(batch: int, sequence: int) -> dict[str, Tensor]:
        return {"x": torch.randn(batch, sequence, 3, 4)}

    # In four dimensions -2 is 2, so the third pair does cancel.
    result = transform(["eliminate_redundant_transposes"], Pair(), inputs(2, 5))

    assert result.count(torch.ops.aten.transpose) == left
    assert worst_error(result, Pair(), inputs) == 0
