"""Recurrent mechanisms against their recurrence in float64, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import onboard.ops  # noqa: F401
from tests.support.ops.naive import relative_error

ops: Any = torch.ops.onboard
LENGTHS = [1, 7, 150]  # one token, less than a chunk, more than two


@pytest.mark.parametrize("length", LENGTHS)
def test_lightning_attention_is_its_recurrence(length: int) -> None:
    q, k, v = (torch.randn(2, length, 3, size) for size in (4, 4, 5))
    slopes = torch.tensor([0.0, 0.1, 3.0])
    state, expected = torch.zeros(2, 3, 4, 5).double(), torch.zeros(2, length, 3, 5).double()
    for i in range(length):
        key, value, query = (item[:, i].double() for item in (k, v, q))
        state = state * (-slopes.double()).exp()[:, None, None] + torch.einsum(
            "bhk,bhv->bhkv", key, value
        )
        expected[:, i] = torch.einsum("bhk,bhkv->bhv", query, state)
    assert relative_error(ops.torch_lightning_attention(q, k, v, slopes), expected) < 1e-5


@pytest.mark.parametrize("length", LENGTHS)
def test_linear_recurrence_starts_anew_where_nothing_is_left(length: int) -> None:
    x, decay = torch.randn(2, length, 3), torch.rand(2, length, 3)
    decay[:, 5::7] = 0
    state, expected = torch.zeros(2, 3).double(), torch.zeros(2, length, 3).double()
    for i in range(length):
        state = expected[:, i] = decay[:, i].double() * state + x[:, i].double()
    assert relative_error(ops.torch_linear_recurrence(x, decay), expected) < 1e-5


@pytest.mark.parametrize("length", LENGTHS)
def test_token_shift_gives_the_token_before(length: int) -> None:
    x = torch.randn(2, length, 3)
    expected = torch.stack([x[:, i - 1] if i else torch.zeros(2, 3) for i in range(length)], 1)
    assert torch.equal(ops.torch_token_shift(x), expected)


@pytest.mark.parametrize("length", LENGTHS)
def test_wkv_is_the_average_that_it_is_called(length: int) -> None:
    key, value, time_decay, time_first = (
        torch.randn(2, length, 3),
        torch.randn(2, length, 3),
        *torch.randn(2, 3),
    )
    expected = torch.zeros(2, length, 3).double()
    for i in range(length):
        # Of each token up to i, from the one before i
        distance = torch.arange(i - 1, -2, -1).double()[None, :, None]
        exponents = key[:, : i + 1].double() - distance * time_decay.double().exp()
        exponents[:, i] = key[:, i].double() + time_first.double()
        expected[:, i] = (exponents.softmax(1) * value[:, : i + 1].double()).sum(1)
    assert relative_error(ops.torch_wkv(key, value, time_decay, time_first), expected) < 1e-5


def test_large_keys_do_not_overflow() -> None:
    key, value = 300 * torch.randn(1, 9, 3), torch.randn(1, 9, 3)
    assert ops.torch_wkv(key, value, torch.zeros(3), torch.zeros(3)).isfinite().all()
    q, v = torch.randn(2, 1, 9, 2, 3)
    assert ops.torch_mlstm(q, q, v, key[..., :2], -key[..., :2], 1e-6).isfinite().all()


def _mlstm(q: Tensor, k: Tensor, v: Tensor, igate: Tensor, fgate: Tensor, eps: float) -> Tensor:
    """The recurrence with its stabiliser, as the paper writes it (equations 19 to 27)."""
    memory, norm, m = (
        torch.zeros(2, 3, 4, 5).double(),
        torch.zeros(2, 3, 4).double(),
        torch.zeros(2, 3).double(),
    )
    outputs = []
    for i in range(q.shape[1]):
        query, key, value, gate, kept = (
            item[:, i].double() for item in (q / 2, k, v, igate, fgate)
        )
        kept = torch.nn.functional.logsigmoid(kept)
        new = torch.maximum(kept + m, gate)
        left, added, m = (kept + m - new).exp()[..., None], (gate - new).exp()[..., None], new
        memory = left[..., None] * memory + added[..., None] * key[..., None] * value[..., None, :]
        norm = left * norm + added * key
        divisor = torch.maximum((norm * query).sum(-1).abs(), (-m).exp()) + eps
        outputs.append(torch.einsum("bhk,bhkv->bhv", query, memory) / divisor[..., None])
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_mlstm_is_its_recurrence(length: int, eps: float) -> None:
    tensors = [torch.randn(2, length, 3, size).double() for size in (4, 4, 5)]
    gates = (3 * torch.randn(2, 2, length, 3).double() + 1).unbind()
    assert (
        relative_error(ops.torch_mlstm(*tensors, *gates, eps), _mlstm(*tensors, *gates, eps)) < 1e-9
    )


def test_registrations_are_sound() -> None:
    x, vector = torch.randn(2, 3, 4), torch.randn(4)
    q = torch.randn(2, 3, 2, 4)
    torch.library.opcheck(
        ops.torch_lightning_attention.default, (q, q, torch.randn(2, 3, 2, 5), torch.rand(2))
    )
    torch.library.opcheck(ops.torch_linear_recurrence.default, (x, x.sigmoid()))
    torch.library.opcheck(ops.torch_token_shift.default, (x,))
    torch.library.opcheck(ops.torch_wkv.default, (x, x + 1, vector, vector))
    gate = torch.randn(2, 3, 2)
    torch.library.opcheck(
        ops.torch_mlstm.default, (q, q, torch.randn(2, 3, 2, 5), gate, gate, 1e-6)
    )


def test_what_is_computed_in_float32_has_the_dtype_of_what_came_in() -> None:
    q, k, v = (torch.randn(2, 5, 3, size).bfloat16() for size in (4, 4, 5))
    assert ops.torch_lightning_attention(q, k, v, torch.rand(3)).dtype == torch.bfloat16
