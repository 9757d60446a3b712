"""Attention that rotates by itself: the same logits and tokens, however it gets its queries."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard import LLM
from onboard.graph.fx import arguments, nodes_of
from onboard.graph.transform import get_transform
from onboard.ops.library import cached_forms
from onboard.runtime.sampling_params import SamplingParams
from tests.support import quantised
from tests.support.sharding.zoo import save_family

ATTENTION, LATENT = "fuse_rope_into_trtllm_attention", "fuse_rope_into_trtllm_mla"
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [7]]


def opened(folder: Path, **transforms: Any) -> LLM:
    caches = {"tokens_per_block": 4}
    config = {"max_seq_len": 64, "transforms": transforms, "kv_cache_config": caches}
    return LLM(str(folder), device="cpu", dtype="float32", config=config)


def computed(llm: LLM) -> tuple[torch.Tensor, list[list[int]]]:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    outputs = llm.generate([list(prompt) for prompt in PROMPTS], params)
    return llm.logits(IDS), [list(each.token_ids) for each in outputs]


def matches(llm: LLM, key: str) -> int:
    [entry] = [entry for entry in llm.engine.history if entry.key == key]
    return entry.num_matches


def assert_same(llm: LLM, other: LLM) -> None:
    (logits, tokens), (expected, wanted) = computed(llm), computed(other)
    assert (logits - expected).norm() / expected.norm() < 1e-6
    assert tokens == wanted


ROTATING = [
    getattr(torch.ops.onboard, name) for name in cached_forms("torch_rope_attention").values()
]
FAMILIES = ("llama", "cohere", "qwen3")
"""Halves, pairs, and halves behind norms of heads."""


@pytest.mark.parametrize(
    ("family", "passthrough"), [*((name, True) for name in FAMILIES), ("llama", False)]
)
def test_attention_rotates(family: str, passthrough: bool, tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    saved = save_family(tmp_path, family, seed)
    fields = {"where": "everywhere", "fuse_qkv_passthrough": passthrough}
    llm = opened(saved, **{ATTENTION: fields})
    assert_same(llm, opened(saved))
    assert matches(llm, ATTENTION) == matches(llm, "insert_cached_rope_attention") == 2
    assert matches(llm, "insert_cached_attention") == 0
    said = [fact for fact in llm.engine.facts if fact.startswith(ATTENTION)]
    assert not said
    named = [arguments(node) for node in nodes_of(llm.engine.gm, *ROTATING)]
    assert [each["q_norm"] is not None for each in named] == [family == "qwen3"] * 2


@pytest.mark.parametrize(("family", "count"), [("llama", 2), ("qwen3", 2), ("unlike norms", 0)])
def test_by_default_it_is_done_where_that_is_faster(
    family: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not without kernels; with them not behind norms of heads that attention does not take in."""
    unlike = family == "unlike norms"
    folder = save_family(tmp_path, "qwen3" if unlike else family, random.randrange(2**31))
    without = opened(folder)
    [entry] = [entry for entry in without.engine.history if entry.key == ATTENTION]
    assert entry.skipped
    module = sys.modules[get_transform(ATTENTION).__module__]
    monkeypatch.setattr(module, "choose_backend", lambda *_: "triton")
    if unlike:
        monkeypatch.setattr(module, "norms_before", lambda *_: None)
    llm = opened(folder)
    assert matches(llm, ATTENTION) == count
    assert_same(llm, without)


def test_latent_attention_rotates(tmp_path: Path) -> None:
    folder = save_family(tmp_path, "deepseek_v3", random.randrange(2**31))
    llm = opened(folder, **{LATENT: {"enabled": True}})
    assert matches(llm, LATENT) == matches(llm, "insert_cached_rope_mla_attention") == 2
    assert_same(llm, opened(folder))


@pytest.mark.parametrize("variant", ["ct_fp8_static"])
def test_scales_of_results_come_along(variant: str) -> None:
    settings: dict[str, Any] = {
        "quantize_fp8_linear_from_config": {"backend": "torch"},
        "fuse_trtllm_attn_quant_fp8": {"enabled": True},
    }
    folder = quantised.FOLDER / variant
    llm = opened(folder, **settings, **{ATTENTION: {"where": "everywhere"}})
    assert matches(llm, ATTENTION) > 0
    assert_same(llm, opened(folder, **settings))
