"""A request that overflowed leaves no numbers in its pages; who has them next answers as
transformers does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.errors import NotFiniteError
from onboard.runtime.engine import Engine
from onboard.runtime.sampling_params import SamplingParams
from onboard.testing.compare import rmse_ratio
from tests.support.runtime.tiny import TINY, Tiny

POISON = 0
"""The token whose embedding is infinite; the rows that pad a step have it, too."""
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 6},
    "deepseek_v3": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 10, "num_key_value_heads": 4,
    },
}  # fmt: skip


def _healthy(model: Tiny, length: int) -> tuple[list[int], list[int]]:
    """A prompt and transformers' 20 tokens after it, neither with the poison: that would be a
    request's own.
    """
    while True:
        prompt = [random.randrange(1, TINY["vocab_size"]) for _ in range(length)]
        answer = model.greedy(prompt, 20)
        if POISON not in answer:
            return prompt, answer


def _poisoned(model: Tiny) -> Engine:
    """An engine whose every page was owned by a request with activations that are no numbers."""
    engine = model.engine(max_num_tokens=9, kv_cache_config={"max_tokens": 96})
    [embedding] = [each for name, each in engine.gm.named_parameters() if "embed_tokens" in name]
    embedding.data[POISON] = torch.inf
    engine.cache.info.decode_sizes = [4]
    assert engine.logits([POISON] * 60).isnan().all()
    for _ in range(2):
        outputs = [engine.submit([POISON] * 45, SamplingParams(max_tokens=4))[0] for _ in range(2)]
        with pytest.raises(NotFiniteError):
            engine.run()
        assert all(output.finish_reason == "abort" for output in outputs)
    return engine


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_request_left_in_a_page_reaches_no_other(
    tiny: Callable[..., Tiny], family: str
) -> None:
    model = tiny(family, own_file=False, **FAMILIES[family])
    engine = _poisoned(model)
    assert any(cache.isnan().any() for cache in engine.cache.caches.values())
    healthy = [_healthy(model, length) for length in (3, 17, 9)]
    params = SamplingParams(temperature=0.0, max_tokens=20)
    outputs = [engine.submit(prompt, params)[0] for prompt, _ in healthy]
    engine.run()
    assert [output.generated for output in outputs] == [answer for _, answer in healthy]
    prompt = healthy[1][0]
    assert rmse_ratio(engine.logits(prompt), model.logits(prompt)) < 1e-5
