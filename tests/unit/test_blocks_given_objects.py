"""What generated tests record of blocks that are given objects, lists and dicts, and that fill them; what
a generated block returns beside its original's result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from onboard.analysis.recognise.recorder import ModuleCall, modules_recorded
from onboard.testing import fresh_seed, record_calls
from onboard.verify.block_outputs import compare_outputs, expected_of


@dataclass
class State:
    total: torch.Tensor
    scale: float = 0.5


class Filling(nn.Module):
    """A block as a repository has it."""

    def forward(self, x: torch.Tensor, given: State, kept: list[torch.Tensor]) -> torch.Tensor:
        given.total = given.total + x * given.scale
        kept.append(x.tanh())
        return x * 2.0


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Filling(), Filling()])

    def forward(self, input_ids: torch.Tensor, **others: Any) -> torch.Tensor:
        x = input_ids[..., None].float() + torch.arange(3.0)
        given, kept = State(torch.zeros_like(x)), list[torch.Tensor]()
        for block in self.blocks:
            x = block(x, given, kept)
        return x + given.total + kept[0]


class Generated(nn.Module):
    """The block as generated code has it; `error` is added to what it returns besides."""

    def __init__(self, error: float = 0.0) -> None:
        super().__init__()
        self.error = error

    def forward(
        self, x: torch.Tensor, given_total: torch.Tensor, given_scale: float, kept: list[Any]
    ) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
        return x * 2.0, given_total + x * given_scale + self.error, [*kept, x.tanh()]


@pytest.fixture
def prompt() -> dict[str, torch.Tensor]:
    torch.manual_seed(fresh_seed())
    ids = torch.randint(1, 50, (2, 5))
    return {"input_ids": ids, "position_ids": torch.arange(5).expand(2, 5)}


@pytest.mark.parametrize("error", [0.0, 1.0])
def test_a_block_is_called_with_the_fields_and_compared_with_what_is_left_in_them(
    error: float, prompt: dict[str, torch.Tensor]
) -> None:
    calls = record_calls(Whole(), ["blocks.1"], [prompt])["blocks.1"]
    (call,) = calls
    pairs = call.replay(Generated(error))
    assert len(pairs) == 4  # the result, the field, the two items of the list
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs) is (error == 0.0)


@pytest.mark.parametrize("error", [0.0, 1.0])
def test_the_proof_compares_what_a_block_returns_besides(
    error: float, prompt: dict[str, torch.Tensor]
) -> None:
    model, calls = Whole(), dict[str, list[ModuleCall]]()
    with modules_recorded(model, calls):
        model(prompt["input_ids"])
    first = calls["blocks.0"][0]
    x = first.args[0]
    output = Generated(error)(x, torch.zeros_like(x), 0.5, [])
    if error:
        with pytest.raises(Exception, match="differs from transformers"):
            compare_outputs("blocks.0", "Generated", output, expected_of(output, first))
    else:
        assert compare_outputs("blocks.0", "Generated", output, expected_of(output, first))[1] == 0


def test_none_stands_for_a_cache() -> None:
    x = torch.randn(2, 3)
    ours, theirs = (x, None, (None, None)), (x.clone(), DynamicCache(), (None, None))
    assert compare_outputs("blocks.0", "Generated", ours, theirs)[1] == 0
