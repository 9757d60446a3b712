from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP

import onboard.ops  # noqa: F401
from onboard.errors import UsageError
from onboard.ops.linear.activation import ACTIVATIONS
from tests.support.ops.naive import relative_error

ops = torch.ops.onboard


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_hugging_face(name: str) -> None:
    x = torch.randn(1000) * 4
    assert relative_error(ACTIVATIONS[name](x), ACT2FN[name](x)) < 1e-6


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize("bias", [True, False])
def test_swiglu_is_that_of_hugging_face(activation: str, bias: bool) -> None:
    config = LlamaConfig(
        hidden_size=8,
        num_attention_heads=2,
        intermediate_size=12,
        hidden_act=activation,
        mlp_bias=bias,
    )
    mlp, x = LlamaMLP(config), torch.randn(2, 5, 8)
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    weights = (gate.weight, up.weight, down.weight)
    actual = ops.torch_swiglu_mlp(x, *weights, gate.bias, up.bias, down.bias, activation)
    assert relative_error(actual, mlp(x)) < 1e-6
    both = torch.cat([gate.weight, up.weight])
    both_bias = torch.cat([gate.bias, up.bias]) if bias else None
    fused = ops.torch_fused_swiglu_mlp(x, both, down.weight, both_bias, down.bias, activation)
    assert relative_error(fused, mlp(x)) < 1e-6


def test_an_unknown_activation_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="Did you mean 'silu'"):
        ops.torch_silu_and_mul(torch.randn(2, 4), "sillu")


def test_silu_and_mul_takes_the_gate_first() -> None:
    gate, up = torch.randn(3, 4).double(), torch.randn(3, 4).double()
    actual = ops.torch_silu_and_mul(torch.cat([gate, up], -1).float())
    assert relative_error(actual, gate / (1 + torch.exp(-gate)) * up) < 1e-6


def test_linear_is_a_matrix_product() -> None:
    x, weight, bias = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)
    expected = torch.einsum("bsi,oi->bso", x.double(), weight.double())
    assert relative_error(ops.torch_linear_simple(x, weight, None), expected) < 1e-6
    assert relative_error(ops.torch_linear_simple(x, weight, bias), expected + bias.double()) < 1e-6


def test_a_linear_takes_in_what_stands_around_it() -> None:
    x, weight, bias, residual = (
        torch.randn(3, 5, 8),
        torch.randn(12, 8),
        torch.randn(12),
        torch.randn(3, 5, 6),
    )
    scale = torch.rand(8) + 0.5
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 0.1).sqrt() * scale.double()
    gate, up = (normed @ weight.double().T + bias.double()).chunk(2, dim=-1)
    expected = gate / (1 + torch.exp(-gate)) * up + residual.double()
    actual = ops.torch_fused_linear(x, weight, bias, residual, scale, 0.1, "silu")
    assert relative_error(actual, expected) < 1e-6
    assert relative_error(ops.torch_fused_linear(x, weight), wide @ weight.double().T) < 1e-6


def test_gather_takes_the_rows_in_the_order_asked_for() -> None:
    hidden, rows = torch.randn(1, 5, 4), torch.tensor([4, 1, 1])
    actual = ops.gather_logits_before_lm_head(hidden, rows)
    assert torch.equal(actual, torch.stack([hidden[:, 4], hidden[:, 1], hidden[:, 1]], dim=1))
    torch.library.opcheck(ops.gather_logits_before_lm_head.default, (hidden, rows))


def test_registration_is_sound() -> None:
    x, gate, up, down = (
        torch.randn(2, 3, 8),
        torch.randn(12, 8),
        torch.randn(12, 8),
        torch.randn(8, 12),
    )
    torch.library.opcheck(ops.torch_linear_simple.default, (x, gate, None))
    torch.library.opcheck(ops.torch_swiglu_mlp.default, (x, gate, up, down))
    torch.library.opcheck(ops.torch_silu_and_mul.default, (x,))
    torch.library.opcheck(ops.torch_fused_swiglu_mlp.default, (x, torch.cat([gate, up]), down))
