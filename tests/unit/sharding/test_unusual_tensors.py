"""Masks and sinks with other numbers of dimensions than usual, and tensors of which a rank has
nothing.
"""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from onboard.graph.sharding.layer_work import mixer_signature
from onboard.graph.weight_load.parameters import Share

B, S, H, D = 2, 5, 4, 8


class _Attention(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        return torch.ops.onboard.torch_attention(x, x, x, attn_mask=mask, sinks=sinks)


def _node(mask: list[int], sinks: list[int]) -> fx.Node:
    inputs = tuple(torch.randn(size) for size in ([B, S, H, D], mask, sinks))
    program = torch.export.export(_Attention(), inputs)
    return next(node for node in program.graph.nodes if "torch_attention" in str(node.target))


@pytest.mark.parametrize(
    ("mask", "sinks", "expected"),
    [
        ([B, H, S, S], [H], (".h..", "h")),
        ([S, S], [H], ("..", "h")),
        ([H, S, S], [B, S, H], ("h..", "..h")),
    ],
)
def test_masks_and_sinks_are_cut_where_their_heads_are(
    mask: list[int], sinks: list[int], expected: tuple[str, str]
) -> None:
    found = mixer_signature(_node(mask, sinks))
    assert found is not None
    letters = {operand.place[0]: operand.letters for operand in found.operands}
    assert (letters["attn_mask"], letters["sinks"]) == expected
    assert letters["query"] == "..h."


def test_a_rank_may_have_nothing_of_a_tensor() -> None:
    assert Share((4, 2), {0: []}).of(torch.ones(4, 2)).shape == (0, 2)
    assert Share((4, 2), {0: [(1, 2), (3, 4)]}).of(torch.ones(4, 2)).shape == (2, 2)
