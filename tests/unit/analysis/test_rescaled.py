"""Weights that a forward divides in place are found, and nothing else may change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from onboard.analysis.recognise.rescaled import Settled, settled
from onboard.analysis.tiny.tiny_model import build_tiny
from onboard.analysis.tiny.tiny_prompts import prompt
from onboard.errors import OnboardError


def _rwkv(**fields: Any) -> Any:
    return build_tiny(AutoConfig.for_model("rwkv", num_hidden_layers=6, **fields))


def test_divided_layers_are_told_by_their_index() -> None:
    model = _rwkv()
    before = copy.deepcopy(model.state_dict())
    found = settled(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {(item.cls.__name__, item.attr) for item in found.linears} == {
        ("RwkvSelfAttention", "output"),
        ("RwkvFeedForward", "value"),
    }
    assert all(item.test == "config.rescale_every > 0" for item in found.linears)
    model(**prompt(0))
    for item in found.linears:
        for module in (each for each in model.modules() if type(each) is item.cls):
            divisor = eval(str(item.divisor), {"self": module, "config": model.config})
            name = next(
                name for name, each in model.named_modules() if each is getattr(module, item.attr)
            )
            assert torch.equal(
                getattr(module, item.attr).weight * divisor, before[f"{name}.weight"]
            )
    assert [(cls.__name__, key, value) for cls, key, value in found.switches] == [
        ("RwkvModel", "layers_are_rescaled", True)
    ]


def test_a_config_without_division_is_told_from_those_with_it() -> None:
    found = settled(_rwkv(rescale_every=0))
    assert {(item.divisor, item.test) for item in found.linears} == {
        (None, "not (config.rescale_every > 0)")
    }


def test_a_division_in_half_precision_alone_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _rwkv()
    trunk: Any = type(model.rwkv)
    divide = trunk._rescale_layers

    def divides(self: Any) -> None:
        if self.embeddings.weight.dtype == torch.float16:
            divide(self)

    divides.__wrapped__ = divide  # type: ignore[attr-defined]  # whose source is read
    monkeypatch.setattr(trunk, "_rescale_layers", divides)
    assert settled(model) == Settled()


def test_other_changes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _rwkv()
    forward = type(model.head).forward

    def changes(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        self.weight.mul_(0.5)
        return forward(self, x)

    monkeypatch.setattr(nn.Linear, "forward", changes)
    with pytest.raises(OnboardError, match="a forward of RwkvForCausalLM changes"):
        settled(model)


def test_a_model_that_changes_nothing_has_nothing_to_tell() -> None:
    found = settled(build_tiny(AutoConfig.for_model("llama")))
    assert not found.linears
    assert not found.switches
