"""Steps that read prompts as whole CUDA graphs: every one is replayed, and every token is
transformers' own.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard import LLM, SamplingParams
from onboard.cache.captured_steps import StepTimes
from tests.support.runtime.tiny import Tiny, make_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
CONFIG = {"max_seq_len": 512, "max_batch_size": 8, "max_num_tokens": 128}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def _load(model: Tiny, **config: Any) -> LLM:
    """Return the model with every step that fits a captured size padded to it."""
    llm = LLM(
        model.checkpoint,
        root=model.root,
        device="cuda",
        dtype="float32",
        config={**CONFIG, **config},
    )
    captured = llm.engine.cache.info.captured
    assert captured is not None
    assert [(size.tokens, size.sequences) for size in captured.times] == [(64, 9), (128, 9)]
    faster = dict.fromkeys((True, False), StepTimes(0.0, 1.0))
    captured.times = dict.fromkeys(captured.times, faster)
    return llm


def _prompts(*lengths: int) -> list[list[int]]:
    return [[random.randrange(SIZES["vocab_size"]) for _ in range(length)] for length in lengths]


def _check(model: Tiny, llm: LLM, prompts: list[list[int]]) -> None:
    outputs = llm.generate(prompts, GREEDY)
    assert [output.token_ids for output in outputs] == [
        model.greedy(prompt, 24) for prompt in prompts
    ]
    stats = llm.engine.stats
    assert stats.graph_replays == stats.steps > 24


@pytest.mark.parametrize("invariant", [False, True])
def test_prompts_in_chunks_beside_sequences_that_decode(tmp_path: Path, invariant: bool) -> None:
    model = make_tiny(tmp_path, **SIZES)
    llm = _load(model, batch_invariant=invariant)
    for _ in range(3):
        lengths = [random.randrange(2, 300) for _ in range(12)]
        _check(model, llm, _prompts(*lengths, 64, 128, 1))


def test_windows(tmp_path: Path) -> None:
    model = make_tiny(tmp_path, "mistral", sliding_window=20, **SIZES)
    _check(model, _load(model), _prompts(3, 200, 17, 90))


def test_a_mixture(tmp_path: Path) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = make_tiny(tmp_path, "mixtral", own_file=False, **experts, **SIZES)
    _check(model, _load(model), _prompts(3, 200, 17, 90))


def test_latent_attention(tmp_path: Path) -> None:
    model = make_tiny(tmp_path, "deepseek_v3", own_file=False, **LATENT, **SIZES)
    _check(model, _load(model), _prompts(3, 200, 17, 90))


def test_measured_times_decide(tmp_path: Path) -> None:
    llm = LLM(
        make_tiny(tmp_path, **SIZES).checkpoint,
        root=tmp_path / "root",
        device="cuda",
        dtype="bfloat16",
        config=CONFIG,
    )
    captured = llm.engine.cache.info.captured
    assert captured is not None
    times = [each for both in captured.times.values() for each in both.values()]
    assert len(times) == 4
    assert all(0 < each.captured < 1 for each in times)
    assert all(0 < each.otherwise < 1 for each in times)
