"""The delta rule that takes away by keys of its own: against the recurrence in float64, token by
token.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import onboard.ops  # noqa: F401
from tests.support.ops.naive import relative_error

ops: Any = torch.ops.onboard
HEADS, KEY, VALUE = 3, 4, 5


def _inputs(length: int, strength: float) -> list[Tensor]:
    """Return q, k, v, a, b and g: a takes keys of length one away, and b puts back less."""
    seed = random.randrange(2**31)
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    q, k, kk = torch.randn(3, 2, length, HEADS, KEY, generator=generator)
    v = torch.randn(2, length, HEADS, VALUE, generator=generator)
    rate, decay = torch.rand(2, 2, length, HEADS, KEY, generator=generator)
    kk = F.normalize(kk, dim=-1)
    return [q, k, v, -kk, kk * rate, -strength * decay**3]  # weak decays beside strong ones


def _looped(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor) -> Tensor:
    """As code of RWKV-7 has it: the state is [value, key], and a matrix is multiplied to it."""
    state, outs = torch.zeros(2, HEADS, VALUE, KEY).double(), []
    for i in range(q.shape[1]):
        r, key, value, take, give, decay = (x[:, i].double() for x in (q, k, v, a, b, g))
        turn = torch.diag_embed(decay.exp()) + take[..., None] @ give[..., None, :]
        state = state @ turn + value[..., None] @ key[..., None, :]
        outs.append((state @ r[..., None]).squeeze(-1))
    return torch.stack(outs, dim=1)


@pytest.mark.parametrize("length", [1, 7, 40])  # one token, less than a chunk, more than two
@pytest.mark.parametrize("strength", [1.0, 100.0, 1e4])
def test_dplr_is_its_recurrence(length: int, strength: float) -> None:
    inputs = _inputs(length, strength)
    expected = _looped(*inputs)
    assert relative_error(ops.torch_dplr_delta_rule(*inputs, 1.0), expected) < 1e-5
    assert relative_error(ops.torch_dplr_delta_rule(*inputs), expected / 2) < 1e-5


def test_decays_that_leave_nothing_are_no_nan() -> None:
    inputs = _inputs(20, 1.0)
    inputs[-1][:, 3] = inputs[-1][:, 17] = -torch.inf
    assert relative_error(ops.torch_dplr_delta_rule(*inputs, 1.0), _looped(*inputs)) < 1e-5


def test_keys_that_take_away_what_they_add_are_kimi_delta_attention() -> None:
    q, k, v, _, _, g = _inputs(40, 1.0)
    k, beta = F.normalize(k, dim=-1), q[..., 0].sigmoid()
    scaled = k * beta[..., None]
    out = ops.torch_dplr_delta_rule(q, scaled, v, -k * g.exp(), scaled, g, 0.3)
    assert relative_error(out, ops.torch_kda(q, k, v, g, beta, 0.3)) < 1e-5


def test_bfloat16_is_computed_in_float32() -> None:
    low = [item.bfloat16() for item in _inputs(40, 1.0)]
    out = ops.torch_dplr_delta_rule(*low, 1.0)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, _looped(*low)) < 1e-2


def test_the_op_is_well_registered() -> None:
    torch.library.opcheck(ops.torch_dplr_delta_rule.default, tuple(_inputs(3, 1.0)))
