"""Mixtures with codes: their Triton kernels, in the interpreter or on a GPU;
`test_triton_kernels.py` starts this as a process.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import onboard.ops  # noqa: F401
from onboard.ops.experts import triton_moe as launcher
from onboard.ops.linear.fp8_linear import quantise_rows
from tests.support.ops.naive import relative_error
from tests.support.ops.quantised_moe import Case, four_bit_case, fp8_case, int8_case, naive

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ops = torch.ops.onboard
SCHEMES = {"rows": ops.triton_fp8_moe, "blocks": ops.triton_finegrained_fp8_moe}
SAME = {torch.float32: 1e-6, torch.bfloat16: 2.5e-2}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(seed := random.randrange(2**31))
    print(f"seed {seed}")


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are rounded to the nearest code: the interpreter, unlike a GPU, cuts them off."""

    def nearest(x: Tensor, how: str, given: Tensor | None, **_: Any) -> tuple[Tensor, Tensor]:
        codes, scale = quantise_rows(x, how, given)
        return codes.contiguous(), scale

    if DEVICE == "cpu":
        monkeypatch.setattr(launcher, "quantise", nearest)


def run(scheme: str, case: Case, **options: Any) -> Tensor:
    tensors = [each.to(DEVICE) for each in case.tensors]
    scales = {name: each.to(DEVICE) for name, each in case.scales.items()}
    return SCHEMES[scheme](*tensors, **scales, **options).cpu()


def cut(case: Case, tokens: int, dtype: torch.dtype = torch.float32) -> Case:
    """The first tokens of a case, its inputs in a dtype, and its expected values of these."""
    x, selected, routing, *weights = case.tensors
    tensors = [x[:tokens].to(dtype), selected[:tokens], routing[:tokens].to(dtype), *weights]
    return Case(tensors, case.scales, case.values)


CASES = [
    *((tokens, "up_gate", dtype) for tokens in (1, 5) for dtype in SAME),
    *((3, order, torch.float32) for order in ("gate_up", "interleaved", "")),
]


@pytest.mark.drawn
@pytest.mark.parametrize(("tokens", "order", "dtype"), CASES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_exact_inputs(scheme: str, order: str, tokens: int, dtype: torch.dtype) -> None:
    case = cut(fp8_case(scheme, order=order, inner=144), tokens, dtype)
    options = {"order": order} if order else {"is_gated_mlp": False}
    assert relative_error(run(scheme, case, **options), naive(case, order)) < SAME[dtype]


@pytest.mark.drawn
@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("quantize", ["token", "group"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantised_inputs(scheme: str, quantize: str) -> None:
    case = cut(fp8_case(scheme, order="up_gate", inner=144), 3)
    actual, expected = run(scheme, case, quantize=quantize), naive(case, "up_gate", quantize)
    assert relative_error(actual, expected) < 2e-3
    one = cut(case, 1)
    assert relative_error(run(scheme, one, quantize=quantize), naive(one, "up_gate")) < 1e-6


@pytest.mark.parametrize("scheme", SCHEMES)
def test_inputs_with_an_experts_scale(scheme: str) -> None:
    """The interpreter cuts off what the kernel converts to float8, so numbers are chosen that are
    codes: those between the products are out of range.
    """
    case = cut(fp8_case(scheme, order="up_gate", inner=48, tensor=True), 3)
    case.tensors[0] = (case.tensors[0] * 3).to(torch.float8_e4m3fn).float() / 16
    case.scales["w3_w1_input_scale"] = 2.0 ** -torch.randint(3, 6, (len(case.tensors[3]),))
    case.scales["w2_input_scale"] *= 1e-9
    actual, expected = run(scheme, case, quantize="tensor"), naive(case, "up_gate", "tensor")
    assert relative_error(actual, expected) < 1e-6


FOUR_BITS = {
    "int4": (ops.triton_int4_moe, 64),
    "zeros": (ops.triton_int4_moe, 256),
    "added": (ops.triton_int4_moe, 32),
    "mxfp4": (ops.triton_mxfp4_moe, 32),
    "nvfp4": (ops.triton_nvfp4_moe, 16),
}
"""Ops and groups by kind."""
WORDS = [
    *((kind, 5, "up_gate", torch.float32) for kind in FOUR_BITS),
    ("mxfp4", 1, "interleaved", torch.float32),
    ("mxfp4", 3, "interleaved", torch.bfloat16),
    ("int4", 1, "", torch.bfloat16),
    ("nvfp4", 1, "gate_up", torch.float32),
]


@pytest.mark.parametrize(("kind", "tokens", "order", "dtype"), WORDS)
def test_words(kind: str, tokens: int, order: str, dtype: torch.dtype) -> None:
    op, group = FOUR_BITS[kind]
    case = cut(four_bit_case(kind, order=order, inner=48, group=group, bias=True), tokens, dtype)
    for name in [name for name in case.scales if name.endswith("bias")]:
        case.scales[name] = case.scales[name].to(dtype)
    tensors = [each.to(DEVICE) for each in case.tensors]
    scales = {name: each.to(DEVICE) for name, each in case.scales.items()}
    options = {"order": order} if order else {"is_gated_mlp": False}
    actual = op(*tensors, **scales, group=group, **options).cpu()
    assert relative_error(actual, naive(case, order)) < SAME[dtype]


INTEGERS = [
    *((tokens, 16, True, "up_gate", dtype) for tokens in (1, 5) for dtype in SAME),
    (3, 32, False, "interleaved", torch.float32),
    (3, 256, False, "", torch.float32),
    (5, 48, True, "gate_up", torch.float32),
]


@pytest.mark.parametrize(("tokens", "group", "offset", "order", "dtype"), INTEGERS)
def test_integers(tokens: int, group: int, offset: bool, order: str, dtype: torch.dtype) -> None:
    case = cut(int8_case(order=order, inner=48, group=group, offset=offset), tokens, dtype)
    options = {"order": order} if order else {"is_gated_mlp": False}
    actual = integers(case, group=group, **options)
    assert relative_error(actual, naive(case, order)) < SAME[dtype]


def integers(case: Case, **options: Any) -> Tensor:
    tensors = [each.to(DEVICE) for each in case.tensors]
    scales = {name: each.to(DEVICE) for name, each in case.scales.items()}
    return ops.triton_int8_moe(*tensors, **scales, **options).cpu()


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_residual_is_added(tokens: int) -> None:
    codes = cut(fp8_case("rows", order="up_gate", inner=48), tokens)
    words = cut(four_bit_case("mxfp4", order="up_gate", inner=48, group=32, bias=True), tokens)
    whole = cut(int8_case(order="up_gate", inner=48, group=16, offset=True), tokens)
    given = [(codes, "fp8", {}), (words, "mxfp4", {"group": 32}), (whole, "int8", {"group": 16})]
    for case, name, options in given:
        tensors = [each.to(DEVICE) for each in case.tensors]
        scales = {key: each.to(DEVICE) for key, each in case.scales.items()}
        residual = torch.randn_like(case.tensors[0])
        for backend in ("torch", "triton"):
            op = getattr(ops, f"{backend}_{name}_moe")
            actual = op(*tensors, **scales, **options, residual=residual.to(DEVICE)).cpu()
            assert relative_error(actual, naive(case, "up_gate") + residual) < 1e-6


@pytest.mark.parametrize("quantize", ["token", "tensor"])
def test_inputs_as_integers(quantize: str) -> None:
    case = int8_case(order="up_gate", inner=48, group=256, tensor=quantize == "tensor")
    case = cut(case, 3)
    actual = integers(case, group=256, quantize=quantize)
    expected = naive(case, "up_gate", quantize)
    # What lies between the products is a rounding apart, which may be another code
    assert relative_error(actual, expected) < 1e-3
    assert relative_error(actual, naive(case, "up_gate")) > 2e-3
    one = cut(case, 1)
    exact = integers(one, group=256, quantize=quantize)
    assert relative_error(exact, naive(one, "up_gate")) < 1e-6


@pytest.mark.parametrize("tokens", [1, 7])
def test_limits_offsets_and_biases(tokens: int) -> None:
    case = cut(fp8_case("rows", order="interleaved", inner=48, bias=True), tokens)
    rest = {"limit": 0.8, "alpha": 1.3, "up_offset": 1.0}
    actual = run("rows", case, order="interleaved", **rest)
    assert relative_error(actual, naive(case, "interleaved", **rest)) < 1e-6


@pytest.mark.parametrize("tokens", [1, 7])
def test_experts_of_others_add_nothing(tokens: int) -> None:
    case = cut(fp8_case("blocks", order="up_gate", inner=48), tokens)
    case.tensors[1][0, 1] = -1
    assert relative_error(run("blocks", case), naive(case, "up_gate")) < 1e-6
