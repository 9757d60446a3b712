"""Ops of recurrent mixers and latent attention: against float64 token by token, and against Hugging
Face.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

import onboard.ops  # noqa: F401
from tests.support.ops import naive
from tests.support.ops.naive import relative_error

ops: Any = torch.ops.onboard

LENGTHS = [1, 7, 130]


def _softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def test_mla_is_attention_over_expanded_keys_and_values() -> None:
    heads, nope, rope, rank, value_dim = 3, 8, 4, 12, 6
    q_nope, q_pe = torch.randn(2, 9, heads, nope), torch.randn(2, 9, heads, rope)
    latent, kpe = torch.randn(2, 9, rank), torch.randn(2, 9, 1, rope)
    weight = torch.randn(heads * (nope + value_dim), rank)
    expanded = torch.einsum("bsr,nor->bsno", latent.double(), weight.double().view(heads, -1, rank))
    key = torch.cat([expanded[..., :nope], kpe.double().expand(-1, -1, heads, -1)], -1)
    query = torch.cat([q_nope, q_pe], -1)
    expected = naive.attention(query, key, expanded[..., nope:], naive.Options(scale=0.3))
    assert (
        relative_error(ops.torch_mla(q_nope, q_pe, latent, kpe, weight, True, 0.3), expected) < 1e-6
    )
    default = naive.attention(query, key, expanded[..., nope:], naive.Options())
    assert relative_error(ops.torch_mla(q_nope, q_pe, latent, kpe, weight), default) < 1e-6


def test_mla_expands_as_deepseek_does() -> None:
    config = deepseek.DeepseekV3Config(
        hidden_size=32, num_attention_heads=4, q_lora_rank=None, kv_lora_rank=12, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=6,
    )  # fmt: skip
    theirs = deepseek.DeepseekV3Attention(config, 0)
    query, latent, kpe = torch.randn(2, 5, 4, 12), torch.randn(2, 5, 12), torch.randn(2, 5, 1, 4)
    key, value = theirs.requires_grad_(False).expand_kv(latent.unsqueeze(1), kpe.transpose(1, 2))
    expected = naive.attention(query, key.transpose(1, 2), value.transpose(1, 2), naive.Options())
    actual = ops.torch_mla(
        query[..., :8], query[..., 8:], latent, kpe, theirs.kv_b_proj.weight.detach()
    )
    assert relative_error(actual, expected) < 1e-6


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_causal_conv_sees_the_past_only(length: int, activation: str | None) -> None:
    x, weight, bias = torch.randn(2, length, 6), torch.randn(6, 1, 4), torch.randn(6)
    expected = torch.zeros(2, length, 6, dtype=torch.float64)
    for i in range(length):
        for tap in range(4):
            if i - tap >= 0:
                expected[:, i] += x[:, i - tap].double() * weight[:, 0, 3 - tap].double()
    expected += bias.double()
    expected = expected if activation is None else F.silu(expected)
    actual = ops.torch_causal_conv1d(x, weight, bias, activation=activation)
    assert relative_error(actual, expected) < 1e-6
    assert torch.equal(
        actual, ops.torch_causal_conv1d(x, weight, bias, 1, 3, 1, 6, "zeros", activation)
    )
    theirs = mamba2.causal_conv1d_fn(
        x.transpose(1, 2), weight.squeeze(1), bias, activation=activation
    )
    assert relative_error(actual, theirs.transpose(1, 2)) < 1e-6


def test_a_convolution_that_is_not_causal_is_refused() -> None:
    with pytest.raises(ValueError, match="is not causal"):
        ops.torch_causal_conv1d(torch.randn(1, 5, 2), torch.randn(2, 1, 4), None, 1, 2, 1, 2)


def _ssm_inputs(length: int) -> dict[str, Tensor]:
    return {
        "hidden_states": torch.randn(2, length, 4, 3), "A": -torch.rand(4) - 0.1, "B": torch.randn(2, length, 2, 5),
        "C": torch.randn(2, length, 2, 5), "D": torch.randn(4), "dt": torch.randn(2, length, 4),
        "dt_bias": torch.randn(4),
    }  # fmt: skip


@pytest.mark.parametrize("length", LENGTHS)
def test_ssm_is_its_recurrence_and_that_of_mamba2(length: int) -> None:
    inputs, limit = _ssm_inputs(length), [0.2, 1.5]
    x, A, B, C, D, dt, dt_bias = (tensor.double() for tensor in inputs.values())
    expected = torch.zeros_like(x)
    state = torch.zeros(2, 4, 3, 5, dtype=torch.float64)
    for t in range(length):
        for head in range(4):
            for b in range(2):
                step = min(
                    max(_softplus(float(dt[b, t, head] + dt_bias[head])), limit[0]), limit[1]
                )
                group = head // 2
                state[b, head] *= math.exp(step * float(A[head]))
                state[b, head] += step * torch.outer(x[b, t, head], B[b, t, group])
                expected[b, t, head] = state[b, head] @ C[b, t, group] + D[head] * x[b, t, head]
    actual = ops.torch_ssm(*inputs.values(), limit, 16)
    assert actual.dtype == torch.float32
    assert relative_error(actual, expected) < 2e-6
    theirs = mamba2.mamba2_chunk_scan(
        inputs["hidden_states"], inputs["dt"], inputs["A"], inputs["B"], inputs["C"], 16, D=inputs["D"],
        dt_bias=inputs["dt_bias"], dt_softplus=True, dt_limit=tuple(limit),
    )  # fmt: skip
    assert relative_error(actual, theirs) < 2e-6


def test_ssm_has_an_unbounded_step_and_float32_output() -> None:
    inputs = _ssm_inputs(5)
    free = ops.torch_ssm(*inputs.values(), [0.0, float("inf")], 256)
    assert relative_error(free, ops.torch_ssm(*inputs.values(), [0.0, 1e9], 2)) < 1e-6
    narrow = ops.torch_ssm(
        *(tensor.bfloat16() for tensor in inputs.values()), [0.0, float("inf")], 256
    )
    assert narrow.dtype == torch.float32
    assert relative_error(narrow, free) < 3e-2


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("gated", [True, False])
def test_selective_scan_is_its_recurrence_and_that_of_mamba(length: int, gated: bool) -> None:
    x, dt, z = (torch.randn(2, length, 3) for _ in range(3))
    A, D, bias = -torch.rand(3, 4) - 0.1, torch.randn(3), torch.randn(3)
    B, C = torch.randn(2, length, 4), torch.randn(2, length, 4)
    expected = torch.zeros(2, length, 3, dtype=torch.float64)
    for b in range(2):
        for channel in range(3):
            state = torch.zeros(4, dtype=torch.float64)
            for t in range(length):
                step = _softplus(float(dt[b, t, channel].double() + bias[channel].double()))
                state = state * (step * A[channel].double()).exp() + step * B[
                    b, t
                ].double() * float(x[b, t, channel])
                expected[b, t, channel] = state @ C[b, t].double() + float(D[channel]) * float(
                    x[b, t, channel]
                )
    expected = expected * F.silu(z.double()) if gated else expected
    gate = z if gated else None
    actual = ops.torch_selective_scan(x, dt, A, B, C, D, gate, bias)
    assert relative_error(actual, expected) < 2e-6
    turned = [None if item is None else item.transpose(1, 2) for item in (x, dt, B, C, gate)]
    theirs = mamba.mamba_selective_scan(
        turned[0],
        turned[1],
        A,
        turned[2],
        turned[3],
        D=D,
        z=turned[4],
        delta_bias=bias,
        delta_softplus=True,
    )
    assert relative_error(actual, theirs.transpose(1, 2)) < 2e-6


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("unit", [True, False])
def test_gated_delta_rule_is_its_recurrence_and_that_of_qwen3_next(length: int, unit: bool) -> None:
    q, k, v = (
        torch.randn(2, length, 2, 6),
        torch.randn(2, length, 2, 6),
        torch.randn(2, length, 4, 5),
    )
    k = k if unit else F.normalize(k, dim=-1)
    g, beta = -torch.rand(2, length, 4), torch.rand(2, length, 4)
    expected = torch.zeros(2, length, 4, 5, dtype=torch.float64)
    for b in range(2):
        for head in range(4):
            state = torch.zeros(6, 5, dtype=torch.float64)
            for t in range(length):
                query, key = q[b, t, head // 2].double(), k[b, t, head // 2].double()
                if unit:
                    query, key = (item / (item @ item + 1e-6).sqrt() for item in (query, key))
                state = state * math.exp(float(g[b, t, head]))
                state = state + float(beta[b, t, head]) * torch.outer(
                    key, v[b, t, head].double() - key @ state
                )
                expected[b, t, head] = query @ state / math.sqrt(6)
    actual = ops.torch_gated_delta_rule(q, k, v, g, beta, None, unit)
    assert relative_error(actual, expected) < 3e-6
    theirs, _ = qwen3_next.torch_chunk_gated_delta_rule(
        q, k, v, g, beta, use_qk_l2norm_in_kernel=unit
    )
    assert relative_error(actual, theirs) < 3e-6
    doubled = ops.torch_gated_delta_rule(q, k, v, g, beta, 2 * 6**-0.5, unit)
    assert relative_error(doubled, 2 * expected) < 3e-6


def test_delta_rule_is_its_recurrence() -> None:
    q, k, v, beta = (
        torch.randn(1, 70, 1, 6),
        torch.randn(1, 70, 1, 6),
        torch.randn(1, 70, 2, 5),
        torch.rand(1, 70, 2),
    )
    keys = F.normalize(k.double(), dim=-1)
    state, expected = torch.zeros(2, 6, 5, dtype=torch.float64), []
    for t in range(70):
        key = keys[0, t, 0]
        missed = v[0, t].double() - torch.einsum("k,hkv->hv", key, state)
        state = state + torch.einsum("k,hv->hkv", key, beta[0, t].double()[:, None] * missed)
        expected.append(torch.einsum("k,hkv->hv", q[0, t, 0].double() * 0.3, state))
    actual = ops.torch_delta_rule(q, keys.float(), v, beta, 0.3)
    assert relative_error(actual, torch.stack(expected)[None]) < 3e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_rmsnorm_is_that_of_mamba2_and_qwen3_next(dtype: torch.dtype) -> None:
    x, gate = (torch.randn(2, 5, 12).to(dtype) for _ in range(2))
    grouped, behind = (
        mamba2.MambaRMSNormGated(12, 4, 1e-3).to(dtype),
        qwen3_next.Qwen3NextRMSNormGated(12, 1e-3).to(dtype),
    )
    for theirs in (grouped, behind):
        torch.nn.init.normal_(theirs.weight)
    assert torch.equal(ops.torch_rmsnorm_gated(x, grouped.weight, gate, 1e-3, 4), grouped(x, gate))
    assert torch.equal(ops.torch_rmsnorm_gated(x, grouped.weight, None, 1e-3, 4), grouped(x, None))
    assert torch.equal(
        ops.torch_rmsnorm_gated(x, behind.weight, gate, 1e-3, 12, True), behind(x, gate)
    )


@pytest.mark.parametrize("before", [True, False])
def test_gated_rmsnorm_is_that_of_falcon_h1_and_of_float64(before: bool) -> None:
    x, gate = torch.randn(2, 5, 12), torch.randn(2, 5, 12)
    theirs = FalconH1RMSNormGated(12, 1e-3, n_groups=3, norm_before_gate=before)
    torch.nn.init.normal_(theirs.weight)
    actual = ops.torch_rmsnorm_gated(x, theirs.weight, gate, 1e-3, 4, before)
    assert relative_error(actual, theirs(x, gate)) < 1e-6
    value, opened = x.double(), F.silu(gate.double())
    groups = (value if before else value * opened).view(2, 5, 3, 4)
    normed = (groups / (groups.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()).view(
        2, 5, 12
    ) * theirs.weight.double()
    assert relative_error(actual, normed * opened if before else normed) < 1e-6


def test_registration_is_sound() -> None:
    x, weight = torch.randn(2, 3, 8), torch.randn(8)
    torch.library.opcheck(ops.torch_rmsnorm_gated.default, (x, weight, x + 1, 1e-6, 4))
    torch.library.opcheck(
        ops.torch_causal_conv1d.default, (x, torch.randn(8, 1, 4), weight, 1, 3, 1, 8)
    )
    torch.library.opcheck(ops.torch_ssm.default, (*_ssm_inputs(5).values(), [0.0, float("inf")], 4))
    B = torch.randn(2, 3, 4)
    torch.library.opcheck(
        ops.torch_selective_scan.default, (x, x + 1, -torch.rand(8, 4), B, B + 1, weight)
    )
    q = torch.randn(2, 3, 2, 4)
    torch.library.opcheck(
        ops.torch_gated_delta_rule.default,
        (q, q + 1, torch.randn(2, 3, 4, 5), -torch.rand(2, 3, 4), torch.rand(2, 3, 4)),
    )
    latent, kpe = torch.randn(2, 3, 6), torch.randn(2, 3, 1, 4)
    torch.library.opcheck(ops.torch_mla.default, (q, q + 1, latent, kpe, torch.randn(2 * 9, 6)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_rmsnorm_that_takes_in_a_cast_gives_its_dtype(dtype: torch.dtype) -> None:
    x, gate, weight = (
        torch.randn(2, 5, 12).bfloat16(),
        torch.randn(2, 5, 12).bfloat16(),
        torch.randn(12).bfloat16(),
    )
    actual = ops.torch_fused_rmsnorm_gated(x, weight, gate, 1e-3, 4, False, dtype)
    assert actual.dtype == dtype
    assert torch.equal(actual, ops.torch_rmsnorm_gated(x, weight, gate, 1e-3, 4).to(dtype))
