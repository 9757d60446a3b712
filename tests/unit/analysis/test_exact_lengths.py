"""Prompts of just as many tokens as some number of the code, where a config does not say how many
there may be.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, WhisperConfig

from onboard.analysis.behaviour.thresholds import crossing_prompts, exact_prompts
from onboard.analysis.tiny.tiny_model import build_small


def test_no_prompt_is_longer_than_a_table_of_positions() -> None:
    """Of a field that has a name of its own: `max_target_positions`; its code says 1500, too."""
    config: PretrainedConfig = WhisperConfig(architectures=["WhisperForCausalLM"])
    model = build_small(config)
    texts = [*crossing_prompts(model), *exact_prompts(model)]
    assert model.config.max_target_positions in {each["input_ids"].shape[1] for each in texts}
    with torch.no_grad():
        for each in texts:
            model(**each, use_cache=False)
