"""Low-rank adapters, each token by its own, against float64."""

from __future__ import annotations

import torch

import onboard.ops  # noqa: F401
from tests.support.ops.lora import Adapted
from tests.support.ops.naive import relative_error

torch_lora = torch.ops.onboard.torch_lora


def test_each_token_has_its_own_adapter() -> None:
    adapted = Adapted.drawn(37, 40, [24, 8, 8], 3, 5, dtype=torch.float32)
    actual = torch_lora(*adapted.arguments())
    assert relative_error(actual, adapted.expected()) < 1e-6


def test_no_adapters_change_nothing() -> None:
    adapted = Adapted.drawn(9, 40, [24], 2, 5, dtype=torch.bfloat16)
    *given, adapters = adapted.arguments()
    for none in (None, torch.zeros_like(adapters)):
        torch.testing.assert_close(torch_lora(*given, none), adapted.outputs, rtol=0, atol=0)


def test_halves_are_activated_and_multiplied() -> None:
    adapted = Adapted.drawn(9, 40, [24, 24], 2, 5, dtype=torch.float32)
    gate, up = adapted.expected().chunk(2, dim=-1)
    actual = torch_lora(*adapted.arguments(), "silu")
    assert relative_error(actual, torch.nn.functional.silu(gate) * up) < 1e-6


def test_a_token_is_not_touched_by_what_overflows_in_the_adapter_of_another() -> None:
    adapted = Adapted.drawn(9, 40, [24], 2, 5, dtype=torch.float16)
    adapted.adapters[0] = torch.tensor([1] * 8 + [2])
    adapted.down[1] = 6e4
    actual = torch_lora(*adapted.arguments())
    assert actual[0, :8].isfinite().all()
