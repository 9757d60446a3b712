"""A bias that is gathered by distance becomes an argument of the op, and nothing that only looks
like one does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.graph.harness import random_inputs, transform, worst_error

ops: Any = torch.ops.onboard
HEADS, DIM = 4, 6


class _Attention(nn.Module):
    """`shift` moves the distances, `drift` those alone that are looked up; `beyond` is what keys
    beyond the extent get.

    `tempered` is the dimension along which a factor differs.
    """

    def __init__(
        self,
        shift: int = 0,
        beyond: float = 0.0,
        tempered: int | None = None,
        extent: int = 5,
        drift: int = 0,
    ) -> None:
        super().__init__()
        self.embed, self.numbers = nn.Embedding(97, HEADS * DIM), nn.Embedding(97, HEADS * extent)
        self.shift, self.beyond, self.tempered, self.extent, self.drift = (
            shift,
            beyond,
            tempered,
            extent,
            drift,
        )

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        shape = (*input_ids.shape, HEADS, -1)
        x, numbers = (
            self.embed(input_ids).view(shape),
            self.numbers(input_ids).view(shape).transpose(1, 2),
        )
        places = torch.arange(input_ids.shape[1])
        distance = (places[:, None] - places[None, :])[None, None] - self.shift
        looked_up = (distance - self.drift).clamp(0, self.extent - 1)
        bias = numbers.gather(-1, looked_up.expand(*numbers.shape[:2], -1, -1))
        bias = bias.masked_fill((distance < 0) | (distance >= self.extent), self.beyond)
        if self.tempered is not None:
            shape = [-1 if dim == self.tempered else 1 for dim in range(4)]
            bias = (bias.float() * torch.log(places + 2.0).view(shape)).to(x.dtype)
        return ops.torch_attention(x, x, x, bias, 0.0, True, 0.3, None, 9)


@pytest.mark.parametrize(
    ("model", "matches"),
    [
        (_Attention(), 1),
        (_Attention(tempered=2), 1),
        (_Attention(tempered=3), 0),
        (_Attention(shift=1), 0),
        (_Attention(drift=1), 0),
        (_Attention(beyond=-1.0), 0),
        (_Attention(beyond=-1.0, extent=60), 0),
    ],
)
def test_only_a_bias_by_distance_becomes_an_argument(model: _Attention, matches: int) -> None:
    model.requires_grad_(False)
    inputs = dict(zip(("input_ids", "position_ids"), random_inputs(2, 13), strict=True))
    result = transform(["match_relative_attention"], model, inputs)
    assert result.matches["match_relative_attention"] == matches
    assert result.count(ops.torch_relative_attention) == matches
    error = worst_error(
        result,
        model,
        lambda *sizes: dict(zip(("input_ids", "position_ids"), random_inputs(*sizes), strict=True)),
    )
    assert error < 1e-6
