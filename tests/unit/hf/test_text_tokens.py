"""Tokens that are no text, beside what transformers' models make of them."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import Gemma3Config, PretrainedConfig, RobertaConfig, RobertaForCausalLM

from onboard.hf.text_tokens import special_tokens, text_tokens, up_to_special
from onboard.testing import fresh_seed
from onboard.workflow.run_model.run_prompts import build_prompts, long_prompt

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


@torch.no_grad()
def test_every_token_of_text_has_the_place_after_the_one_before() -> None:
    seed = fresh_seed()
    torch.manual_seed(seed)
    padding = random.Random(seed).randrange(60)
    config = RobertaConfig(**SIZES, vocab_size=60, pad_token_id=padding, is_decoder=True)
    model = RobertaForCausalLM(config).eval()

    def counts(ids: list[int]) -> bool:
        """Whether the model gives a text the positions that the engine gives it."""
        places = torch.arange(padding + 1, padding + 1 + len(ids))[None]
        own, given = (
            model(torch.tensor([ids]), position_ids=each).logits for each in (None, places)
        )
        return torch.equal(own, given)

    words = text_tokens(config)
    assert len(words) > 50
    assert counts(words)
    assert not counts([words[0], padding, words[1]])


def test_a_place_of_an_image_is_no_text_and_an_end_is() -> None:
    config = Gemma3Config(
        text_config={**SIZES, "vocab_size": 50, "pad_token_id": 3}, image_token_index=7
    )
    assert {3, 7} <= special_tokens(config)
    assert not {config.text_config.bos_token_id, config.text_config.eos_token_id} & special_tokens(
        config
    )
    assert set(text_tokens(config)) == set(range(50)) - special_tokens(config)
    assert text_tokens(PretrainedConfig(vocab_size=5)) == [0, 1, 2, 3, 4]


def test_random_prompts_are_text_and_a_text_ends_behind_a_token_that_is_none() -> None:
    words = text_tokens(PretrainedConfig(vocab_size=5, pad_token_id=2))
    facts: list[str] = []
    prompts = [prompt.token_ids for prompt in build_prompts(None, Path(), words, 100, facts)]
    for ids in (*prompts, long_prompt(None, Path(), words, 200)):
        assert set(ids) <= {0, 1, 3, 4}
    assert up_to_special([4, 2, 1], frozenset({2})) == [4, 2]
    assert up_to_special([4, 1], frozenset({2})) == [4, 1]
