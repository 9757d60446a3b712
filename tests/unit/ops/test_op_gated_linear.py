"""Gated linear attention: against the recurrence in float64, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onboard.ops  # noqa: F401
from tests.support.ops.naive import relative_error

ops: Any = torch.ops.onboard
HEADS, KEY, VALUE = 3, 4, 5
LENGTHS = [1, 7, 40]  # one token, less than a chunk, more than two


def _inputs(length: int, strength: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k = torch.randn(2, 2, length, HEADS, KEY)
    decay = -strength * torch.rand(2, length, HEADS, KEY) ** 3  # weak ones beside strong ones
    return q, k, torch.randn(2, length, HEADS, VALUE), decay


def _looped(q: Tensor, k: Tensor, v: Tensor, g: Tensor, first: Tensor | None = None) -> Tensor:
    state, out = torch.zeros(2, HEADS, KEY, VALUE).double(), torch.zeros(v.shape).double()
    for i in range(q.shape[1]):
        query, key, value, decay = (item[:, i].double() for item in (q, k, v, g))
        added = torch.einsum("bhk,bhv->bhkv", key, value)
        read = state if first is None else state + first.double()[..., None] * added
        state = state * decay.exp()[..., None] + added
        out[:, i] = torch.einsum("bhk,bhkv->bhv", query, state if first is None else read)
    return out


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("strength", [1.0, 100.0])
def test_gated_linear_attention_is_its_recurrence(length: int, strength: float) -> None:
    inputs, first = _inputs(length, strength), torch.randn(HEADS, KEY)
    expected = _looped(*inputs)
    assert relative_error(ops.torch_gated_linear_attention(*inputs), expected) < 1e-5
    expected = _looped(*inputs, first)
    assert relative_error(ops.torch_gated_linear_attention(*inputs, first), expected) < 1e-5


def test_what_is_small_behind_a_strong_decay_counts() -> None:
    """Of infinite ones, too, and of such that their sum has no room for others."""
    q, k, v, g = _inputs(40, 1.0)
    g[:, ::3, 0], g[:, ::4, 1], g[:, 5, 2] = -torch.inf, -1e30, -1e6
    first = torch.randn(HEADS, KEY)
    for weight in (None, first):
        out = ops.torch_gated_linear_attention(q, k, v, g, weight)
        assert relative_error(out, _looped(q, k, v, g, weight)) < 1e-5


def test_heads_that_forget_alike_are_lightning_attention() -> None:
    q, k, v, _ = _inputs(40, 1.0)
    slopes = torch.rand(HEADS)
    expected = ops.torch_lightning_attention(q, k, v, slopes)
    decay = (-slopes)[:, None].expand(q.shape)
    assert relative_error(ops.torch_gated_linear_attention(q, k, v, decay), expected) < 1e-5


def test_the_result_has_the_dtype_of_queries() -> None:
    q, k, v, g = _inputs(20, 1.0)
    low = ops.torch_gated_linear_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), g)
    assert low.dtype == torch.bfloat16
    inputs = (item.bfloat16().float() for item in (q, k, v))
    assert relative_error(low, ops.torch_gated_linear_attention(*inputs, g)) < 1e-2


@pytest.mark.parametrize("weighted", [False, True])
def test_registration_is_sound(weighted: bool) -> None:
    first = torch.randn(HEADS, KEY) if weighted else None
    torch.library.opcheck(ops.torch_gated_linear_attention.default, (*_inputs(3, 1.0), first))
