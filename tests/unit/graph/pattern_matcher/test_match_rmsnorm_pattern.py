from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from tests.support.graph.harness import transform, worst_error

KEY = "match_rmsnorm_pattern"
CANONICAL = torch.ops.onboard.torch_rmsnorm
SIZE = 32


def _inputs(dtype: torch.dtype) -> Callable[[int, int], dict[str, Tensor]]:
    return lambda batch, sequence: {"x": torch.randn(batch, sequence, SIZE, dtype=dtype)}


class _Wrapped(nn.Module):
    def __init__(self, norm: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = norm.to(dtype)
        nn.init.normal_(norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [LlamaRMSNorm, Gemma2RMSNorm, Olmo2RMSNorm])
def test_norms_round_where_hugging_face_rounds(
    norm: Callable[..., nn.Module], dtype: torch.dtype
) -> None:
    module = _Wrapped(norm(SIZE, eps=1e-2), dtype)
    result = transform([KEY], module, _inputs(dtype)(2, 5))

    assert result.matches[KEY] == 1
    assert result.count(CANONICAL) == 1
    assert result.count(torch.ops.aten.rsqrt) == 0
    assert worst_error(result, module, _inputs(dtype)) < 1e-6


def test_pytorchs_own_norm_is_matched() -> None:
    module = _Wrapped(nn.RMSNorm(SIZE, eps=1e-2), torch.float32)
    result = transform([KEY], module, _inputs(torch.float32)(2, 5))

    assert result.count(CANONICAL) == 1
    assert worst_error(result, module, _inputs(torch.float32)) < 1e-6


class _Variant(nn.Module):
    def __init__(self, formula: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE))
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x, self.weight)


@pytest.mark.parametrize(
    ("formula", "matches"),
    [
        (lambda x, w: w * (x * torch.pow((x * x).mean(-1, keepdim=True) + 0.1, -0.5)), 1),
        (lambda x, w: torch.rsqrt(0.1 + x.square().mean(-1, keepdim=True)) * x * w, 1),
        # Another tensor than the one that is measured, another dimension, a sum: none of them is
        # this norm.
        (lambda x, w: w * ((x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1)), 0),
        (lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 0.1)), 0),
        (lambda x, w: w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 0.1)), 0),
        (lambda x, w: w * (x * torch.rsqrt(x.pow(3).abs().mean(-1, keepdim=True) + 0.1)), 0),
    ],
)
def test_what_counts_is_the_formula(
    formula: Callable[[Tensor, Tensor], Tensor], matches: int
) -> None:
    module = _Variant(formula)
    result = transform([KEY], module, _inputs(torch.float32)(2, 5))

    assert result.matches[KEY] == matches
    assert worst_error(result, module, _inputs(torch.float32)) < 1e-6
