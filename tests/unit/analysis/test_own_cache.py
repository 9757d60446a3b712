"""A reference that contradicts itself: refused when prefill does, noted when decode does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.rwkv.modeling_rwkv import RwkvCausalLMOutput

from onboard.analysis.behaviour import cache_probe
from onboard.analysis.behaviour.cache_probe import cache_notes
from onboard.analysis.tiny.loaded_config import load_config
from onboard.analysis.tiny.tiny_model import build_tiny
from onboard.errors import OnboardError
from tests.support.families import config_dict


def _tiny(family: str) -> nn.Module:
    return build_tiny(load_config(config_dict(family)))


def _shift(model: nn.Module, condition: Callable[[dict[str, Any]], bool]) -> None:
    """Have a model's logits be others when the keywords of a call fulfil a condition."""

    def hook(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if condition(kwargs):
            output.logits = output.logits + 0.01
        return output

    model.register_forward_hook(hook, with_kwargs=True)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_models_that_agree_with_themselves_get_no_note(family: str) -> None:
    assert cache_notes(_tiny(family)) == []


class _Summing(nn.Module):
    """Says of each token the sum up to it, and keeps that as its state."""

    def forward(
        self, input_ids: torch.Tensor, use_cache: bool = False, state: torch.Tensor | None = None
    ) -> RwkvCausalLMOutput:
        before = torch.zeros(1) if state is None else state
        sums = before + input_ids.cumsum(1)
        return RwkvCausalLMOutput(logits=sums.unsqueeze(-1), state=sums[:, -1:])


def test_what_a_model_calls_its_state_is_handed_on() -> None:
    assert cache_probe._decode_notes(_Summing(), {"input_ids": torch.randint(1, 9, (2, 7))}) == []


def test_prefill_that_differs_with_a_cache_is_refused() -> None:
    model = _tiny("llama")
    _shift(model, lambda kwargs: kwargs.get("use_cache") is not False)
    with pytest.raises(
        OnboardError, match="LlamaForCausalLM gives other logits in prefill with its cache"
    ):
        cache_notes(model)


def test_decode_that_differs_is_noted() -> None:
    model = _tiny("llama")
    _shift(model, lambda kwargs: kwargs.get("past_key_values") is not None)
    (note,) = cache_notes(model)
    assert "cached decode differs from its prefill" in note
    assert "which the generated model follows" in note


def test_a_cache_that_does_not_work_is_noted() -> None:
    model = _tiny("llama")

    def fail(kwargs: dict[str, Any]) -> bool:
        if kwargs.get("use_cache") is not False:
            raise ValueError("no such\ncache")
        return False

    _shift(model, fail)
    assert cache_notes(model) == [
        "transformers' cache does not work on the small model: ValueError: no such cache"
    ]
