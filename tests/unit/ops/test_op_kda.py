"""Kimi Delta Attention: against the recurrence in float64, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onboard.ops  # noqa: F401
from tests.support.ops.naive import relative_error

ops: Any = torch.ops.onboard


@pytest.mark.parametrize("length", [1, 7, 40])
@pytest.mark.parametrize("normed", [False, True])
def test_kda_is_its_recurrence(length: int, normed: bool) -> None:
    q, k, g = (
        torch.randn(2, length, 3, 4),
        torch.randn(2, length, 3, 4),
        -2 * torch.rand(2, length, 3, 4),
    )
    v, beta = torch.randn(2, length, 3, 5), torch.rand(2, length, 3)
    query, key = q.double(), k.double()
    if normed:
        query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    else:
        k = key = k / 2  # a rate times a squared length beyond 2 would make the recurrence diverge
        key = key.double()
    state, expected = torch.zeros(2, 3, 4, 5).double(), torch.zeros(2, length, 3, 5).double()
    for i in range(length):
        state = state * g[:, i].double().exp()[..., None]
        error = v[:, i].double() - torch.einsum("bhk,bhkv->bhv", key[:, i], state)
        state = state + torch.einsum(
            "bhk,bhv->bhkv", key[:, i], beta[:, i].double()[..., None] * error
        )
        expected[:, i] = torch.einsum("bhk,bhkv->bhv", query[:, i], state)
    assert relative_error(ops.torch_kda(q, k, v, g, beta, 1.0, normed), expected) < 1e-5
    assert relative_error(ops.torch_kda(q, k, v, g, beta, None, normed), expected / 2) < 1e-5


def test_registration_is_sound() -> None:
    q = torch.randn(2, 3, 2, 4)
    torch.library.opcheck(
        ops.torch_kda.default,
        (q, q + 1, torch.randn(2, 3, 2, 5), -torch.rand(2, 3, 2, 4), torch.rand(2, 3, 2)),
    )
