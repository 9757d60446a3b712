"""Adapters in captured decode steps: a replay computes each request with its own, or with none."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from onboard import SamplingParams
from tests.support.runtime.adapters import make_adapter
from tests.support.runtime.tiny import make_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_replays_compute_each_request_with_its_adapter(tmp_path: Path) -> None:
    """Batches of other adapters follow one another through the same graphs, and batches without any
    through graphs of their own; some requests have excluded tokens, which the graph behind the step
    leaves out.
    """
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, base = random.Random(seed), make_tiny(tmp_path)
    layers = {"attention": ["q_proj", "v_proj", "o_proj"], "gated": ["up_proj", "down_proj"]}
    adapters = {name: make_adapter(tmp_path / name, base, each) for name, each in layers.items()}
    folders = {name: str(each.folder) for name, each in adapters.items()}
    engine = base.engine(device="cuda", lora=folders)
    sources = {None: base, **adapters}
    assert any("CUDA graphs of their own" in fact for fact in engine.facts)
    for without in (False, True, False, True, False):
        names = [None if without else rng.choice([None, *adapters]) for _ in range(4)]
        prompts = [[rng.randrange(97) for _ in range(rng.randint(2, 9))] for _ in names]
        greedy = [sources[name].greedy(each, 12) for name, each in zip(names, prompts, strict=True)]
        ends = sorted(set(greedy[0]))
        free = SamplingParams(max_tokens=12, temperature=0.0)
        params = [free.model_copy(update={"lora": name}) for name in names]
        params[0] = params[0].model_copy(update={"min_tokens": 12, "stop_token_ids": ends})
        requests = [
            engine.submit(prompt, each)[0] for prompt, each in zip(prompts, params, strict=True)
        ]
        engine.run()
        assert set(requests[0].generated).isdisjoint(ends)
        assert [each.generated for each in requests[1:]] == greedy[1:]
    assert engine.stats.graph_replays > 20
