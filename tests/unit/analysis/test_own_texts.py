"""Models that round what they compute of a text, count from its first position, or read it in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from onboard.analysis.behaviour.idle import is_idle
from onboard.analysis.behaviour.rounding import check_rounding, rounds_in
from onboard.analysis.behaviour.texts import pieces_of_a_text
from onboard.analysis.tiny.tiny_prompts import positions_below_length, prompt
from onboard.analysis.tiny.tiny_sizes import VOCABULARY
from onboard.errors import OnboardError


class _Coarse(nn.Linear):
    activations = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = (self.weight * 8).round() / 8
        return nn.functional.linear((input * 8).round() / 8 if self.activations else input, weight)


def _model() -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    model.model.layers[1].mlp.up_proj = _Coarse(16, 16, bias=False)
    return model


def test_rounded_weights_are_weights() -> None:
    assert rounds_in(_model()) is None


def test_rounded_activations_are_refused_by_their_module() -> None:
    model = _model()
    model.model.layers[1].mlp.up_proj.activations = True
    with pytest.raises(OnboardError, match=r"in model\.layers\.1\.mlp\.up_proj"):
        check_rounding(model)


class _WithHeads(LlamaForCausalLM):
    def forward(self, **inputs: Any) -> Any:
        output = super().forward(**inputs)
        self.later(output.logits.flip(1))
        return output


def test_what_logits_do_not_depend_on_is_idle() -> None:
    model = _model()
    model.__class__, model.later = _WithHeads, nn.Linear(VOCABULARY, 3)
    paths = ("later", "lm_head", "model.layers.0.self_attn", "model.layers.1")
    assert [is_idle(model, path, prompt(0)) for path in paths] == [True, False, False, False]


class _ByName(LlamaForCausalLM):
    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> Any:
        made = self.model.forward(input_ids=input_ids, use_cache=False)
        self.later.forward(made.last_hidden_state)
        return CausalLMOutput(logits=self.lm_head(made.last_hidden_state))


def test_a_forward_that_is_called_by_its_name_is_read_as_well() -> None:
    model = _model()
    model.__class__, model.later = _ByName, nn.Linear(16, 3)
    assert [is_idle(model, path, prompt(0)) for path in ("later", "model")] == [True, False]


@pytest.mark.parametrize("relative", [True, False])
def test_positions_relative_to_the_first_are_below_the_length(relative: bool) -> None:
    model = _model()
    forward = model.model.rotary_emb.forward

    def rotary(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        length = position_ids.shape[-1]
        if relative:
            position_ids = position_ids - position_ids.min(dim=-1, keepdim=True)[0]
            position_ids = torch.arange(length)[position_ids]
        return forward(x, position_ids)

    model.model.rotary_emb.forward = rotary
    assert positions_below_length(model) is relative


class _InPieces(nn.Module):
    """Reads the first tokens of a text before the others; or all of it twice."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.inner, self.first = _model(), first

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> Any:
        parts = [slice(0, self.first), slice(self.first, None)] if self.first else [slice(None)] * 2
        outputs = [
            self.inner(input_ids[:, part], position_ids=position_ids[:, part]) for part in parts
        ]
        return outputs[-1]


@pytest.mark.parametrize(("first", "found"), [(0, None), (5, ("inner.model.layers.0", [5, 16]))])
def test_a_text_that_is_read_in_pieces_is_noticed(
    first: int, found: tuple[str, list[int]] | None
) -> None:
    assert pieces_of_a_text(_InPieces(first), prompt(0)) == found
