"""A mask that keeps the keys of the largest bias becomes an op, and nothing that only looks like
one does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.graph.harness import transform

ops: Any = torch.ops.onboard
HEADS, DIM, VOCABULARY = 4, 6, 997


class _Attention(nn.Module):
    """`smallest` keeps other keys, `early` makes the mask causal only after the choice.

    A `window` is that of the attention, `chosen_in` that in which keys are chosen.
    """

    def __init__(
        self,
        keep: int,
        smallest: bool = False,
        early: bool = False,
        window: int | None = None,
        chosen_in: int | None = None,
    ) -> None:
        super().__init__()
        self.embed, self.bias = nn.Embedding(VOCABULARY, HEADS * DIM), nn.Embedding(VOCABULARY, 2)
        self.keep, self.smallest, self.early = keep, smallest, early
        self.window, self.chosen_in = window, chosen_in

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).view(*input_ids.shape, HEADS, DIM)
        least, length = torch.finfo(x.dtype).min, input_ids.shape[1]
        bias = self.bias(input_ids).exp().transpose(-1, -2)
        mask = bias[:, :, None, :].expand(-1, -1, length, -1)
        if not self.early:
            mask = mask.masked_fill(torch.ones_like(mask, dtype=torch.bool).triu(1), least)
        if self.chosen_in is not None:
            mask = mask.masked_fill(
                torch.ones_like(mask, dtype=torch.bool).tril(-self.chosen_in), least
            )
        chosen = torch.topk(
            mask, torch.sym_min(self.keep, length), dim=-1, largest=not self.smallest
        ).indices
        kept = torch.zeros_like(mask).scatter(-1, chosen, 1.0)
        mask = mask.masked_fill(kept == 0.0, least)
        mask = (
            mask[:, :, None]
            .expand(-1, -1, 2, -1, -1)
            .reshape(input_ids.shape[0], HEADS, length, length)
        )
        return ops.torch_attention(x, x, x, mask, 0.0, True, 0.3, None, self.window)


@pytest.mark.parametrize(
    ("model", "matches"),
    [
        (_Attention(6), 1),
        (_Attention(2048), 1),
        (_Attention(6, smallest=True), 0),
        (_Attention(6, early=True), 0),
        (_Attention(3, window=7, chosen_in=7), 1),
        (_Attention(7, window=7, chosen_in=7), 1),
        (_Attention(2048, window=4096, chosen_in=4096), 1),
        (_Attention(3, window=7), 0),
        (_Attention(3, chosen_in=7), 0),
        (_Attention(3, window=7, chosen_in=9), 0),
        (_Attention(2048, window=4096, chosen_in=4095), 0),
    ],
)
def test_only_a_mask_that_keeps_the_largest_biases_becomes_an_op(
    model: _Attention, matches: int
) -> None:
    model.requires_grad_(False)

    def inputs(batch: int, length: int) -> dict[str, Tensor]:
        # No two keys have the same bias
        ids = torch.randperm(VOCABULARY)[: batch * length].view(batch, length)
        return {
            "input_ids": ids,
            "position_ids": torch.arange(length).expand(batch, length).clone(),
        }

    result = transform(["match_dynamic_mask_attention"], model, inputs(2, 13))
    assert result.matches["match_dynamic_mask_attention"] == matches
    assert result.count(ops.torch_dynamic_mask_attention) == matches
    for given in (inputs(2, 11), inputs(1, 3), inputs(3, 17)):
        torch.testing.assert_close(result.gm(**given), model(**given), rtol=1e-5, atol=1e-6)
