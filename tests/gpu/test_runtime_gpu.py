"""The runtime on a GPU: bfloat16, Triton attention, captured decode steps, a cache sized by
measurement.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard import LLM, SamplingParams
from onboard.runtime.calls.outputs import RequestOutput
from onboard.verify.transforms.stages import VerifyReport, verify_model
from tests.support.runtime.tiny import Tiny, make_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
CONFIG = {"max_seq_len": 128, "max_batch_size": 8}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("gpu"), **SIZES)


def _load(model: Tiny, **config: Any) -> LLM:
    return LLM(
        model.checkpoint,
        root=model.root,
        device="cuda",
        dtype="bfloat16",
        config={**CONFIG, **config},
    )


def _prompts() -> list[list[int]]:
    return [
        [random.randrange(SIZES["vocab_size"]) for _ in range(length)]
        for length in (3, 70, 17, 33, 9)
    ]


def _describe(report: VerifyReport) -> str:
    return f"{report.first_failure}, {report.limit}, seed {report.seed}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_graph_is_the_model_after_every_transform(model: Tiny, dtype: str) -> None:
    report = verify_model(
        model.checkpoint, root=model.root, device="cuda", dtype=dtype, config=CONFIG
    )
    assert report.passed, _describe(report)
    assert report.graph_replays > 0


def test_a_window_on_the_gpu(tmp_path: Path) -> None:
    mistral = make_tiny(tmp_path, "mistral", sliding_window=20, **SIZES)
    report = verify_model(
        mistral.checkpoint, root=mistral.root, device="cuda", config=CONFIG, dtype="bfloat16"
    )
    assert report.passed, _describe(report)


def _assert_likeliest(model: Tiny, outputs: list[RequestOutput]) -> None:
    """Each token is transformers' own choice given what precedes it, but for ties within bfloat16's
    rounding.

    Rounding moves transformers' own logits in bfloat16 from those in float32; ours may be off by as
    much again.
    """
    rounded = copy.deepcopy(model.hf).to("cuda", torch.bfloat16)
    exact = copy.deepcopy(rounded).float()
    right = 0
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids + output.token_ids], device="cuda")
        with torch.no_grad():
            rows, reference = (
                hf(ids).logits[0, len(output.prompt_token_ids) - 1 : -1].float()
                for hf in (rounded, exact)
            )
        chosen = reference.gather(1, torch.tensor(output.token_ids, device="cuda")[:, None])[:, 0]
        gap = reference.amax(-1) - chosen
        right += int((gap == 0).sum())
        assert float(gap.max()) <= 2 * float((rows - reference).abs().max())
    assert right > 0.8 * sum(len(output.token_ids) for output in outputs)


def test_greedy_tokens_come_from_replayed_graphs_and_are_the_likeliest(model: Tiny) -> None:
    llm = _load(model)
    outputs = llm.generate(_prompts(), GREEDY)
    assert llm.engine.stats.graph_replays == 39  # every step but the one that prefills
    assert not [fact for fact in llm.engine.facts if "CUDA graph" in fact]
    _assert_likeliest(model, outputs)


def test_preempted_sequences_go_on_with_the_likeliest_tokens(model: Tiny) -> None:
    llm = _load(model, kv_cache_config={"max_tokens": 256})
    outputs = llm.generate(_prompts(), GREEDY)
    assert llm.engine.stats.preemptions > 0
    _assert_likeliest(model, outputs)


def test_a_batch_without_a_captured_size_is_a_fact(model: Tiny) -> None:
    llm = _load(model, cuda_graph_config={"batch_sizes": [1, 2]})
    llm.generate(_prompts()[:3], SamplingParams(temperature=0.0, max_tokens=4))
    assert "decode steps of 3 sequences ran without a CUDA graph" in llm.engine.facts


def test_the_cache_takes_its_share_of_the_memory_that_is_left(
    model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        "max_batch_size": 4096,
        "max_num_tokens": 4096,
        "cuda_graph_config": {"batch_sizes": [1]},
    }
    seen: list[int] = []  # others may take from the device, and give back, meanwhile
    ask = torch.cuda.mem_get_info

    def listen(*args: Any) -> tuple[int, int]:
        seen.append(ask(*args)[0])
        return seen[-1], ask(*args)[1]

    monkeypatch.setattr(torch.cuda, "mem_get_info", listen)
    llm = _load(model, **config, kv_cache_config={"free_gpu_memory_fraction": 0.001})
    cache = llm.engine.cache
    useful = 1 + 4096 * cache.info.pages_per_sequence
    assert cache.num_pages < useful
    taken = sum(each.nbytes for each in cache.caches.values())
    assert taken == cache.num_pages * cache.bytes_per_page
    assert any(0.0008 * free < taken < 0.001 * free for free in seen)
