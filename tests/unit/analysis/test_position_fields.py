"""The field with the number of positions, found by what models do with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from onboard.analysis.behaviour.position_fields import position_field


class OddConfig(PretrainedConfig):
    model_type = "odd_positions"

    def __init__(
        self, vocab_size: int = 64, rows: int = 200, patch: int = 32, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.vocab_size, self.rows, self.patch = vocab_size, rows, patch


class Base(PreTrainedModel):
    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, 8)
        self.places = nn.Embedding(config.rows, 8)
        self.register_buffer("mask", torch.ones(config.rows, config.rows).tril(), persistent=False)
        self.post_init()


class LookedUp(Base):
    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        return CausalLMOutput(logits=x @ self.words.weight.T)


class Masked(Base):
    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        x, length = self.words(input_ids), input_ids.shape[1]
        scores = (x @ x.transpose(1, 2)).masked_fill(self.mask[:length, :length] == 0, -1e9)
        return CausalLMOutput(logits=scores.softmax(-1) @ x @ self.words.weight.T)


class InPieces(Base):
    """`patch` is no number of positions: longer texts are cut into pieces of that size."""

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        x = self.words(input_ids)
        if x.shape[1] > self.config.patch:
            x = x.view(x.shape[0], -1, self.config.patch, 8).flatten(1, 2)
        return CausalLMOutput(logits=x @ self.words.weight.T)


class Regrown(Base):
    """Its tables have more rows where a text is longer."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.table = torch.arange(config.rows).float().cos()

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        length = input_ids.shape[1]
        if length > self.table.shape[0]:
            self.table = torch.arange(length).float().cos()
        x = self.words(input_ids) * self.table[:length, None]
        return CausalLMOutput(logits=x @ self.words.weight.T)


class MadeByTheFirstCall(Base):
    """Its table is there once it has been called, and has more rows where a text is longer."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.known, self.first = config.rows, True

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        length = input_ids.shape[1]
        if self.first or length > self.known:
            self.first, self.known = False, max(self.known, length)
            self.table = torch.arange(self.known).float().cos()
        x = self.words(input_ids) * self.table[:length, None]
        return CausalLMOutput(logits=x @ self.words.weight.T)


@pytest.mark.parametrize(
    ("model", "field"),
    [
        *[(LookedUp, "rows"), (Masked, "rows"), (InPieces, None)],
        *[(Regrown, "rows"), (MadeByTheFirstCall, "rows")],
    ],
)
def test_the_field_is_the_one_that_bounds_texts(model: type, field: str | None) -> None:
    assert position_field(model, OddConfig()) == field


def test_a_number_of_positions_by_its_usual_name_is_left_as_it_is() -> None:
    assert position_field(LookedUp, OddConfig(max_position_embeddings=200)) is None
