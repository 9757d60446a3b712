"""Steps that check drafts as whole CUDA graphs: they are replayed, and every token is the plain
engine's, drafts right or wrong. Heads that draft draft the same with and without graphs.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard import LLM, SamplingParams
from onboard.cache.captured_steps import StepTimes
from onboard.graph.compile.captured_prompts import draft_sizes
from onboard.runtime.engine import Engine
from tests.gpu.test_captured_prompts_gpu import LATENT
from tests.support.runtime.own_heads import make_headed
from tests.support.runtime.tiny import Tiny, make_tiny
from tests.unit.runtime.test_own_heads import Watched
from tests.unit.runtime.test_speculation import KnownDrafts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
CONFIG = {"max_seq_len": 512, "max_batch_size": 8, "max_num_tokens": 128}
DRAFTS = 5
"""As many as `KnownDrafts` has at most."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)


def _load(model: Tiny, **config: Any) -> Engine:
    llm = LLM(
        model.checkpoint,
        root=model.root,
        device="cuda",
        dtype="float32",
        config={**CONFIG, **config},
    )
    return llm.engine


def _drafting(model: Tiny, **config: Any) -> Engine:
    """Return an engine with every step with drafts that fits a captured size padded to it."""
    speculative = {"draft": "ngram", "num_tokens": DRAFTS}
    engine = _load(model, speculative=speculative, **config)
    captured = engine.cache.info.captured_drafts
    assert captured is not None
    assert list(captured.times) == draft_sizes(DRAFTS, 128, 8, 512)
    assert all(0 < each[False].captured < 1 for each in captured.times.values())
    captured.times = dict.fromkeys(captured.times, {False: StepTimes(0.0, 1.0)})
    assert not any("without a CUDA graph" in fact for fact in engine.facts)
    return engine


def _check(model: Tiny, params: SamplingParams, **config: Any) -> None:
    """Compare tokens with and without drafts, of a full batch and of one sequence alone."""
    engine, plain = _drafting(model, **config), _load(model, **config)
    for count in (1, 3, 8):
        seed = random.randrange(2**31)
        print(f"seed {seed}")
        draw = random.Random(seed)
        prompts = [
            [draw.randrange(SIZES["vocab_size"]) for _ in range(draw.randrange(2, 100))]
            for _ in range(count)
        ]
        expected = [plain.submit(prompt, params)[0] for prompt in prompts]
        plain.run()
        known = {tuple(each.prompt): each.generated for each in expected}
        drafting = replace(engine, drafter=KnownDrafts(known, seed))
        found, steps = [drafting.submit(prompt, params)[0] for prompt in prompts], 0
        before = int(engine.gm.replays)

        def count_step(step: Any) -> None:
            nonlocal steps
            alone = all(chunk.completes and chunk.length <= 1 + DRAFTS for chunk in step.chunks)
            steps += bool(step.num_drafts and alone)

        drafting.run(count_step)
        assert [each.generated for each in found] == [each.generated for each in expected]
        assert drafting.stats.accepted_tokens > 10
        assert int(engine.gm.replays) - before >= steps > 5


def test_drafts_beside_prompts_and_sequences_without(tmp_path: Path) -> None:
    _check(make_tiny(tmp_path, **SIZES), GREEDY)


def test_sampled_tokens(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=48)
    _check(make_tiny(tmp_path, **SIZES), params)


def test_windows(tmp_path: Path) -> None:
    _check(make_tiny(tmp_path, "mistral", sliding_window=20, **SIZES), GREEDY)


def test_a_mixture(tmp_path: Path) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    _check(make_tiny(tmp_path, "mixtral", own_file=False, **experts, **SIZES), GREEDY)


def test_latent_attention(tmp_path: Path) -> None:
    _check(make_tiny(tmp_path, "deepseek_v3", own_file=False, **LATENT, **SIZES), GREEDY)


@pytest.mark.parametrize(
    ("release", "model_type", "count", "own"),
    [
        ("Qwen3-Next", "qwen3", 1, {"head_dim": 64}),
        ("DeepSeek-V3, GLM-4.5", "qwen3", 3, {"head_dim": 64}),
        ("DeepSeek-V3, GLM-4.5", "deepseek_v3", 1, LATENT),
    ],
    ids=["one", "in turn", "latent attention"],
)
def test_heads_draft_the_same_without_graphs(
    release: str, model_type: str, count: int, own: dict[str, Any], tmp_path: Path
) -> None:
    model = make_headed(tmp_path, release, model_type, count, **own, **SIZES).tiny
    prompts = [
        [random.randrange(SIZES["vocab_size"]) for _ in range(random.randrange(2, 100))]
        for _ in range(6)
    ]
    speculative, found = {"draft": "mtp", "num_tokens": 3}, []
    for backend in ("torch-simple", "torch-cudagraph"):
        engine = _load(model, speculative=speculative, compile_backend=backend)
        drafter = engine.drafter
        drafter.__class__ = Watched
        assert isinstance(drafter, Watched)
        seen = drafter.watch()
        outputs = [engine.submit(prompt, GREEDY)[0] for prompt in prompts]
        engine.run()
        found.append(([output.generated for output in outputs], seen))
    assert found[0] == found[1]
    for head in drafter.heads:
        assert head.captured
        assert head.gm.replays > 10
        head.captured.times = {}  # nothing is padded to them: steps without their graphs
    again = [engine.submit(prompt, GREEDY)[0] for prompt in prompts]
    engine.run()
    assert [output.generated for output in again] == found[0][0]
