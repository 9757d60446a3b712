"""Keys that stand for blocks of tokens, and attention to them: against float64 number by number."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import onboard.ops  # noqa: F401
from onboard.cache.resources import KVPagedResource
from tests.support.ops import naive
from tests.support.ops.naive import relative_error

ops: Any = torch.ops.onboard


def _entry(values: Tensor, gates: Tensor, bias: Tensor, block: int, overlap: bool) -> list[float]:
    """One block's entry, of values and gates [sequence, channels], channel by channel."""
    size, dim = len(bias), values.shape[1] // (1 + overlap)
    out = []
    for channel in range(dim):
        own = channel + dim * overlap
        terms = [(block * size + i, i, own) for i in range(size)]
        if overlap and block > 0:
            terms += [((block - 1) * size + i, i, channel) for i in range(size)]
        weights = [
            math.exp(float(gates[token, c]) + float(bias[place, c])) for token, place, c in terms
        ]
        total = sum(
            w * float(values[token, c]) for w, (token, _, c) in zip(weights, terms, strict=True)
        )
        out.append(total / sum(weights))
    return out


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("length", "size"), [(14, 3), (8, 4), (2, 3), (5, 1)])
def test_a_blocks_last_token_has_the_mean_that_gates_weigh(
    length: int, size: int, overlap: bool
) -> None:
    values, gates, bias = torch.randn(2, length, 6), torch.randn(2, length, 6), torch.randn(size, 6)
    expected = torch.zeros(2, length, 6 // (1 + overlap), dtype=torch.float64)
    for row, block in [(row, block) for row in range(2) for block in range(length // size)]:
        expected[row, (block + 1) * size - 1] = torch.tensor(
            _entry(values[row], gates[row], bias, block, overlap)
        )
    actual = ops.torch_gated_pool(values, gates, bias, overlap)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


def test_half_precision_gates_are_weighed_in_float32() -> None:
    values, gates, bias = torch.randn(1, 128, 4), 9 * torch.randn(1, 128, 4), torch.randn(128, 4)
    half = ops.torch_gated_pool(values.bfloat16(), gates.bfloat16(), bias)
    wide = ops.torch_gated_pool(
        values.bfloat16().double(), gates.bfloat16().double(), bias.double()
    )
    assert half.dtype == torch.bfloat16
    assert relative_error(half[:, -1], wide[:, -1]) < 2e-2


@pytest.mark.parametrize("choose", [False, True])
@pytest.mark.parametrize(
    ("length", "size", "window"), [(13, 3, 4), (9, 2, 1), (3, 4, 9), (8, 8, 2)]
)
def test_a_query_sees_its_window_and_the_blocks_that_have_ended(
    length: int, size: int, window: int, choose: bool
) -> None:
    query, kv, entries = (torch.randn(2, length, *shape) for shape in ((3, 6), (1, 6), (6,)))
    sinks = torch.randn(3)
    chosen = torch.rand(2, length, length // size + 1).argsort(-1)[..., :2] - 1 if choose else None
    # Tokens, then the entry of each token's block
    mask = torch.zeros(2, 1, length, 2 * length, dtype=torch.bool)
    for row, at, key in [(b, i, k) for b in range(2) for i in range(length) for k in range(i + 1)]:
        mask[row, 0, at, key] = at - key < window
        block, ends = key // size, key % size == size - 1
        mask[row, 0, at, length + key] = ends and (
            chosen is None or block in chosen[row, at].tolist()
        )
    keys = torch.cat([kv, entries.unsqueeze(2)], dim=1)
    expected = naive.attention(
        query, keys, keys, naive.Options(scale=0.3, sinks=sinks), mask, causal=False
    )
    actual = ops.torch_compressed_attention(query, kv, entries, chosen, size, window, 0.3, sinks)
    assert relative_error(actual, expected) < 1e-6


@pytest.mark.parametrize(
    ("page", "size"), [(4, 3), (4, 4), (4, 1), (4, 9), (6, 4), (64, 128), (1, 2)]
)
def test_a_page_has_room_for_the_blocks_that_end_in_it_each_in_its_own_place(
    page: int, size: int
) -> None:
    for start in range(0, 40 * page, page):
        places = [at % page // size for at in range(start, start + page) if at % size == size - 1]
        assert len(set(places)) == len(places)
        assert (
            max(places, default=0)
            < KVPagedResource(1, 5, torch.float32, page, None, size).keys_per_page
        )


def test_registration_is_sound() -> None:
    q, kv, entries = torch.randn(2, 5, 2, 4), torch.randn(2, 5, 1, 4), torch.randn(2, 5, 4)
    chosen = torch.zeros(2, 5, 1, dtype=torch.int64)
    torch.library.opcheck(ops.torch_compressed_attention.default, (q, kv, entries, chosen, 2, 3))
    torch.library.opcheck(
        ops.torch_gated_pool.default, (entries, entries + 1, torch.randn(2, 4), True)
    )
