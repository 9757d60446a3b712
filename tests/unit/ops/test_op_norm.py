from __future__ import annotations

import pytest
import torch
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import l2norm

import onboard.ops  # noqa: F401
from tests.support.ops.naive import relative_error

ops = torch.ops.onboard

DTYPES = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", DTYPES)
def test_rmsnorm_is_that_of_hugging_face_and_of_float64(dtype: torch.dtype) -> None:
    x, eps = (torch.randn(2, 5, 12) * 3).to(dtype), 1e-3
    theirs = LlamaRMSNorm(12, eps).to(dtype)
    torch.nn.init.normal_(theirs.weight)
    actual = ops.torch_rmsnorm(x, theirs.weight, eps)
    assert actual.dtype == dtype
    assert torch.equal(actual, theirs(x))
    d = x.double()
    assert (
        relative_error(
            actual, d / (d.pow(2).mean(-1, keepdim=True) + eps).sqrt() * theirs.weight.double()
        )
        < DTYPES[dtype]
    )


def test_rmsnorm_with_one_plus_weight_is_that_of_gemma() -> None:
    x, theirs = torch.randn(2, 5, 12), GemmaRMSNorm(12, 1e-3)
    torch.nn.init.normal_(theirs.weight)
    assert relative_error(ops.torch_rmsnorm(x, 1 + theirs.weight, 1e-3), theirs(x)) < 1e-6


def test_rmsnorm_promotes_to_the_dtype_of_the_weight() -> None:
    x, weight = torch.randn(3, 8).bfloat16(), torch.randn(8)
    assert ops.torch_rmsnorm(x, weight, 1e-6).dtype == torch.float32
    assert ops.torch_rmsnorm(x.float(), weight.bfloat16(), 1e-6).dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_l2norm_has_the_sum_of_squares(dtype: torch.dtype) -> None:
    x = torch.randn(2, 5, 4, 12).to(dtype)
    actual = ops.torch_l2norm(x, 1e-3)
    assert actual.dtype == dtype
    assert (
        relative_error(actual, x.double() / (x.double().pow(2).sum(-1, keepdim=True) + 1e-3).sqrt())
        < DTYPES[dtype]
    )
    assert relative_error(actual, l2norm(x, dim=-1, eps=1e-3)) < DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scaled", "shifted"), [(True, True), (True, False), (False, False)])
def test_layernorm_is_that_of_float64(dtype: torch.dtype, scaled: bool, shifted: bool) -> None:
    x = (torch.randn(2, 5, 12) + 2).to(dtype)
    weight = torch.randn(12).to(dtype) if scaled else None
    bias = torch.randn(12).to(dtype) if shifted else None
    actual = ops.torch_layernorm(x, weight, bias, 1e-3)
    d = x.double() - x.double().mean(-1, keepdim=True)
    expected = d / (d.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    expected = expected * (weight.double() if scaled else 1) + (bias.double() if shifted else 0)
    assert actual.dtype == dtype
    assert relative_error(actual, expected) < DTYPES[dtype]


def test_layernorm_is_that_of_cohere() -> None:
    x, theirs = torch.randn(2, 5, 12), CohereLayerNorm(12, 1e-3)
    torch.nn.init.normal_(theirs.weight)
    assert relative_error(ops.torch_layernorm(x, theirs.weight, None, 1e-3), theirs(x)) < 1e-6


def test_fused_add_rmsnorm_is_both_steps() -> None:
    x, residual, weight = (
        torch.randn(3, 8).bfloat16(),
        torch.randn(3, 8).bfloat16(),
        torch.randn(8).bfloat16(),
    )
    normed, total = ops.torch_fused_add_rmsnorm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, ops.torch_rmsnorm(x + residual, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_registration_is_sound(dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 3, 8).to(dtype), torch.randn(8).to(dtype)
    torch.library.opcheck(ops.torch_rmsnorm.default, (x, weight, 1e-6))
    torch.library.opcheck(ops.torch_l2norm.default, (x, 1e-6))
    torch.library.opcheck(ops.torch_layernorm.default, (x, weight, None, 1e-6))
    torch.library.opcheck(ops.torch_fused_add_rmsnorm.default, (x, x + 1, weight, 1e-6))


def test_fake_results_are_as_real_ones() -> None:
    """In dtypes that are promoted, and of rows that lie in memory in another order."""
    for x_dtype, weight_dtype in (
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ):
        for x in (
            torch.randn(2, 3, 4, 8).to(x_dtype),
            torch.randn(2, 4, 3, 8).to(x_dtype).transpose(1, 2),
        ):
            weight = torch.randn(8).to(weight_dtype)
            torch.library.opcheck(
                ops.torch_rmsnorm.default, (x, weight, 1e-6), test_utils="test_faketensor"
            )
            torch.library.opcheck(
                ops.torch_fused_add_rmsnorm.default,
                (x, x.float() + 1, weight.half(), 1e-6, torch.float16),
                test_utils="test_faketensor",
            )
    x, up, down = torch.randn(2, 3, 8), torch.randn(12, 8), torch.randn(5, 6)
    torch.library.opcheck(ops.torch_silu_and_mul.default, (x,), test_utils="test_faketensor")
    torch.library.opcheck(
        ops.torch_fused_swiglu_mlp.default, (x, up, down), test_utils="test_faketensor"
    )
