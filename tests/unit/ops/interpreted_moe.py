"""The mixtures' Triton kernels, in the interpreter or on a GPU; `test_triton_kernels.py` starts
this as a process.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import onboard.ops  # noqa: F401
from onboard.ops.library import plain_function
from tests.support.ops.naive import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ops = torch.ops.onboard
ERRORS = {torch.float32: 1e-6, torch.bfloat16: 2.5e-2}


def _mixture(
    tokens: int, *, experts: int = 6, top: int = 2, hidden: int = 40, inner: int = 24, gated: bool = True,
    bias: bool = False, dtype: torch.dtype = torch.float32,
) -> tuple[list[Tensor | None], list[Tensor | None]]:  # fmt: skip
    """Return (x, selected, routing, up and gate, down), (their biases)."""
    rows = (2 if gated else 1) * inner
    selected = torch.stack([torch.randperm(experts)[:top] for _ in range(tokens)])
    tensors = [torch.randn(tokens, hidden), selected, torch.rand(tokens, top)]
    tensors += [
        torch.randn(experts, rows, hidden) / hidden**0.5,
        torch.randn(experts, hidden, inner) / inner**0.5,
    ]
    biases = [torch.randn(experts, rows), torch.randn(experts, hidden)] if bias else [None, None]
    return [each.to(DEVICE, dtype if each.is_floating_point() else None) for each in tensors], [
        each if each is None else each.to(DEVICE, dtype) for each in biases
    ]


def _expected(
    tensors: list[Tensor], gated: bool, act: str, biases: list[Tensor | None], *rest: float
) -> Tensor:
    wide = [each.double() if each.is_floating_point() else each for each in tensors]
    return ops.torch_moe_fused(
        *wide, gated, act, *(b if b is None else b.double() for b in biases), *rest
    )


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("tokens", [1, 3, 37])
@pytest.mark.parametrize("gated", [True, False])
def test_every_number_of_tokens(dtype: torch.dtype, tokens: int, gated: bool) -> None:
    tensors, biases = _mixture(tokens, gated=gated, bias=tokens == 3, dtype=dtype)
    actual = ops.triton_moe_fused(*tensors, gated, "silu", *biases)
    assert actual.dtype == dtype
    assert relative_error(actual, _expected(tensors, gated, "silu", biases)) < ERRORS[dtype]


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh", "relu2"])
def test_activations(tokens: int, act: str) -> None:
    tensors, biases = _mixture(tokens)
    actual = ops.triton_moe_fused(*tensors, True, act)
    assert relative_error(actual, _expected(tensors, True, act, biases)) < 1e-6


def test_called_by_keyword_without_the_dispatcher() -> None:
    tensors, _ = _mixture(5)
    names = ("x", "selected_experts", "routing_weights", "w3_w1_stacked_weight")
    named = dict(zip((*names, "w2_stacked_weight"), tensors, strict=True))
    for op in (ops.triton_moe_fused, ops.invariant_moe_fused):
        actual = plain_function(op)(**named, act_fn="gelu")
        assert relative_error(actual, _expected(tensors, True, "gelu", [None, None])) < 1e-6


@pytest.mark.parametrize("tokens", [1, 5])
def test_limits_offsets_and_biases(tokens: int) -> None:
    tensors, biases = _mixture(tokens, bias=True)
    rest = (0.8, 1.3, 1.0)
    actual = ops.triton_moe_fused(*tensors, True, "silu", *biases, *rest)
    assert relative_error(actual, _expected(tensors, True, "silu", biases, *rest)) < 1e-6


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_residual_is_added(tokens: int, dtype: torch.dtype) -> None:
    tensors, biases = _mixture(tokens, dtype=dtype)
    residual = torch.randn(tokens, 2 * tensors[0].shape[1], device=DEVICE, dtype=dtype)[:, ::2]
    expected = _expected(tensors, True, "silu", biases) + residual.double()
    for op in (ops.triton_moe_fused, ops.invariant_moe_fused, ops.torch_moe_fused):
        actual = op(*tensors, True, "silu", residual=residual)
        assert relative_error(actual, expected) < ERRORS[dtype]


@pytest.mark.parametrize("tokens", [1, 6])
def test_experts_of_others_add_nothing(tokens: int) -> None:
    tensors, biases = _mixture(tokens, top=3, bias=True)
    tensors[1][0, 1], tensors[1][-1, 0] = -1, 10**6
    actual = ops.triton_moe_fused(*tensors, True, "silu", *biases)
    assert relative_error(actual, _expected(tensors, True, "silu", biases)) < 1e-6


def test_one_expert_has_all_tokens_and_rows_may_lie_apart() -> None:
    tensors, biases = _mixture(40, top=1)
    tensors[1].fill_(4)
    wide = torch.randn(40, 96, device=DEVICE)
    tensors[0] = wide[:, 16:56]
    actual = ops.triton_moe_fused(*tensors)
    assert relative_error(actual, _expected(tensors, True, "silu", biases)) < 1e-6


def test_the_sort_takes_several_chunks_and_more_experts_than_pairs() -> None:
    from onboard.ops.experts import triton_moe as moe

    for experts, shape in ((300, (70, 3)), (3, (41, 2)), (64, (2, 2))):
        selected = torch.randint(experts, shape, device=DEVICE)
        selected[1, 0] = experts
        routed = moe.route(selected, experts, 16)
        flat, order = selected.flatten(), routed.order.long()
        known = int((flat < experts).sum())
        expected = torch.sort(flat, stable=True).indices[:known]
        assert torch.equal(order[:known], expected)
        rows = [
            place
            for expert, first, end in routed.blocks.tolist()
            for place in range(first, min(end, first + 16))
        ]
        assert sorted(rows) == list(range(known))
        assert all(
            bool((flat[order[first : min(end, first + 16)]] == expert).all())
            for expert, first, end in routed.blocks.tolist()
        )


def test_results_do_not_change_from_run_to_run() -> None:
    tensors, _ = _mixture(33)
    assert torch.equal(ops.triton_moe_fused(*tensors), ops.triton_moe_fused(*tensors))


ROUTERS = {
    "softmax": {},
    "not normalized": {"normalize": False, "scale": 2.5},
    "sigmoid": {"scoring": "sigmoid", "epsilon": 0.1},
    "groups": {"scoring": "sigmoid", "groups": 4, "top_groups": 2, "group_top": 2},
    "groups by their best": {"groups": 3, "top_groups": 2, "group_top": 1, "normalize": False},
}


@pytest.mark.drawn
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("options", ROUTERS.values(), ids=ROUTERS)
def test_router(options: dict[str, object], biased: bool) -> None:
    logits = torch.randn(2, 9, 24, device=DEVICE)
    bias = torch.randn(24, device=DEVICE) * 0.2 if biased else None
    weights, experts = ops.triton_moe_router(logits, 4, bias=bias, **options)
    expected, chosen = ops.torch_moe_router(logits.double().float(), 4, bias=bias, **options)
    assert torch.equal(experts, chosen)
    assert relative_error(weights, expected) < 1e-6


def test_router_of_rows_that_lie_apart_in_16_bits() -> None:
    logits = torch.randn(5, 40, device=DEVICE).bfloat16()[:, 8:28]
    weights, experts = ops.triton_moe_router(logits, 20)
    assert torch.equal(experts.sort().values, torch.arange(20, device=DEVICE).expand(5, 20))
    expected, _ = ops.torch_moe_router(logits, 20)
    assert relative_error(weights, expected) < 1e-6
