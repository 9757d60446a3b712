"""Mixtures with codes against a loop over tokens and experts in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import onboard.ops  # noqa: F401
from onboard.errors import UsageError
from tests.support.ops.naive import relative_error
from tests.support.ops.quantised_moe import Case, four_bit_case, fp8_case, int8_case, naive

ops = torch.ops.onboard
SCHEMES = {"rows": ops.torch_fp8_moe, "blocks": ops.torch_finegrained_fp8_moe}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(seed := random.randrange(2**31))
    print(f"seed {seed}")


def run(scheme: str, case: Case, **options: Any) -> Tensor:
    return SCHEMES[scheme](*case.tensors, **case.scales, **options)


@pytest.mark.parametrize("order", ["up_gate", "gate_up", "interleaved"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("inner", [48, 144])
def test_each_expert_computes_with_its_codes(scheme: str, order: str, inner: int) -> None:
    case = fp8_case(scheme, order=order, inner=inner)
    actual = run(scheme, case, order=order)
    assert relative_error(actual, naive(case, order)) < 1e-6


FOUR_BITS = {
    "int4": (ops.torch_int4_moe, 64),
    "zeros": (ops.torch_int4_moe, 256),
    "added": (ops.torch_int4_moe, 32),
    "mxfp4": (ops.torch_mxfp4_moe, 32),
    "nvfp4": (ops.torch_nvfp4_moe, 16),
}
"""Ops and groups by kind."""


@pytest.mark.parametrize("order", ["up_gate", "interleaved", ""])
@pytest.mark.parametrize("kind", FOUR_BITS)
def test_each_expert_computes_with_its_words(kind: str, order: str) -> None:
    op, group = FOUR_BITS[kind]
    case = four_bit_case(kind, order=order, inner=48, group=group, bias=True)
    options = {"order": order} if order else {"is_gated_mlp": False}
    actual = op(*case.tensors, **case.scales, group=group, **options)
    assert relative_error(actual, naive(case, order)) < 1e-6


@pytest.mark.parametrize("kind", FOUR_BITS)
def test_registration_with_words_is_sound(kind: str) -> None:
    op, group = FOUR_BITS[kind]
    case = four_bit_case(kind, order="up_gate", inner=32, group=group)
    options = {name: each for name, each in case.scales.items() if not name.endswith("_scale")}
    scales = (case.scales["w3_w1_weight_scale"], case.scales["w2_weight_scale"])
    options["group"] = group
    utilities = ("test_schema", "test_faketensor") if kind != "nvfp4" else "test_faketensor"
    torch.library.opcheck(op.default, (*case.tensors, *scales), options, test_utils=utilities)


INTEGERS = [(16, True), (32, False), (256, False)]
"""Groups, and whether they have offsets; the last are rows."""


@pytest.mark.parametrize(("group", "offset"), INTEGERS)
@pytest.mark.parametrize("order", ["up_gate", "interleaved", ""])
def test_each_expert_computes_with_its_integers(order: str, group: int, offset: bool) -> None:
    case = int8_case(order=order, inner=48, group=group, offset=offset)
    options = {"order": order} if order else {"is_gated_mlp": False}
    actual = ops.torch_int8_moe(*case.tensors, **case.scales, group=group, **options)
    assert relative_error(actual, naive(case, order)) < 1e-6


@pytest.mark.parametrize("quantize", ["token", "tensor"])
def test_inputs_are_integers_too(quantize: str) -> None:
    case = int8_case(order="gate_up", inner=48, group=256, tensor=quantize == "tensor")
    options = {"group": 256, "order": "gate_up"}
    actual = ops.torch_int8_moe(*case.tensors, **case.scales, **options, quantize=quantize)
    expected = naive(case, "gate_up", quantize)
    # What lies between the products is a rounding apart, which may be another code
    assert relative_error(actual, expected) < 1e-3
    exact = ops.torch_int8_moe(*case.tensors, **case.scales, **options)
    assert relative_error(exact, expected) > 2e-3


def test_registration_with_integers_is_sound() -> None:
    case = int8_case(order="up_gate", inner=48, group=16, offset=True)
    scales = [case.scales.pop(f"{name}_weight_scale") for name in ("w3_w1", "w2")]
    arguments = (*case.tensors, *scales)
    checks = ("test_schema", "test_faketensor")
    options = {**case.scales, "group": 16}
    torch.library.opcheck(ops.torch_int8_moe.default, arguments, options, test_utils=checks)


@pytest.mark.parametrize("quantize", ["token", "group", "tensor"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_inputs_of_both_products_are_quantised(scheme: str, quantize: str) -> None:
    case = fp8_case(scheme, order="up_gate", inner=144, tensor=quantize == "tensor")
    actual = run(scheme, case, quantize=quantize)
    expected = naive(case, "up_gate", quantize)
    # What lies between the products is a rounding apart, which may be another code
    assert relative_error(actual, expected) < 4e-3
    assert relative_error(run(scheme, case), expected) > 5e-3


def test_limits_offsets_caps_and_biases() -> None:
    case = fp8_case("rows", order="interleaved", inner=48, bias=True)
    rest = {"limit": 0.8, "alpha": 1.3, "up_offset": 1.0, "gate_cap": 1.5, "up_cap": 0.9}
    actual = run("rows", case, order="interleaved", **rest)
    assert relative_error(actual, naive(case, "interleaved", "", **rest)) < 1e-6


def test_experts_without_a_gate() -> None:
    case = fp8_case("blocks", order="", inner=200)
    actual = run("blocks", case, is_gated_mlp=False, act_fn="relu2")
    assert relative_error(actual, naive(case, "", act="relu2")) < 1e-6


def test_ids_of_others_add_nothing() -> None:
    case = fp8_case("rows", order="up_gate", inner=48)
    case.tensors[1][0] = torch.tensor([-1, 99])
    actual = run("rows", case)
    assert relative_error(actual, naive(case, "up_gate")) < 1e-6
    assert not actual[0].any()


def test_an_unknown_order_is_refused() -> None:
    case = fp8_case("rows", order="up_gate", inner=48)
    with pytest.raises(UsageError, match="order of rows 'upward'"):
        run("rows", case, order="upward")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_registration_is_sound(scheme: str) -> None:
    case = fp8_case(scheme, order="up_gate", inner=48)
    arguments = (
        *case.tensors,
        *(case.scales[name] for name in ("w3_w1_weight_scale", "w2_weight_scale")),
    )
    # The other checks multiply the arguments, which float8 cannot
    torch.library.opcheck(SCHEMES[scheme].default, arguments, test_utils="test_faketensor")
