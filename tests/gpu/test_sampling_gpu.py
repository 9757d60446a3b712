"""The choice of tokens on a GPU: the interpreted tests as they are, rows of real size, and
overlapped steps.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from onboard import SamplingParams
from onboard.ops.sampling.sampling import choose_tokens
from onboard.ops.sampling.triton_sampling import choose_and_keep
from tests.support.apart import run_apart
from tests.support.runtime.tiny import make_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

UNIT = Path(__file__).resolve().parents[1] / "unit" / "ops"


def test_kernels_are_right_on_the_device() -> None:
    run_apart(UNIT, "interpreted_sampling.py", interpreted=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_real_size(dtype: torch.dtype) -> None:
    """Sums of float32 may put a border elsewhere than those of float64: nearly all tokens are the
    same.
    """
    rows = 64
    logits = (torch.randn(rows, 151936, device="cuda") * 2).to(dtype)
    how = torch.tensor(
        [(1.0, 0, 1.0, 0.0), (0.7, 50, 0.9, 0.0), (1.2, 0, 0.8, 0.01), (0.0, 0, 1.0, 0.0)],
        device="cuda",
    )
    columns = how.repeat(rows // 4, 1).T.contiguous()
    uniform = torch.rand(rows, dtype=torch.float64, device="cuda")
    expected = choose_tokens(logits, *columns, uniform)
    latest = torch.zeros(rows, dtype=torch.int64, device="cuda")
    landed = torch.zeros(rows, 2, dtype=torch.int64, pin_memory=True)
    lengths = torch.arange(rows, dtype=torch.int32, device="cuda")
    tokens = choose_and_keep(logits, *columns, uniform, latest, landed, lengths.long(), lengths)
    assert (tokens == expected).float().mean() > 0.9
    assert torch.equal(tokens[3::4], expected[3::4])
    assert torch.equal(tokens, latest)
    assert torch.equal(tokens.cpu(), landed.gather(1, lengths.cpu().long()[:, None] % 2)[:, 0])


def test_overlapped_steps_give_the_tokens_of_the_others(tmp_path: Path) -> None:
    """In float32, with stops and preemptions; batches of other sizes round otherwise, but hardly
    ever to a tie.
    """
    model = make_tiny(tmp_path)
    settings = {"device": "cuda", "kv_cache_config": {"max_tokens": 128, "tokens_per_block": 4}}
    engines = [model.engine(overlap=overlap, **settings) for overlap in (False, True)]
    prompts = [[random.randrange(97) for _ in range(length)] for length in (5, 17, 9, 30, 11, 2)]
    params = [
        SamplingParams(max_tokens=30, seed=seed, top_k=20, stop_token_ids=[3, 4])
        for seed in range(6)
    ]
    answers = []
    for engine in engines:
        outputs = [
            engine.submit(prompt, each)[0] for prompt, each in zip(prompts, params, strict=True)
        ]
        engine.run()
        answers.append([output.generated for output in outputs])
    assert answers[0] == answers[1]
    assert engines[0].stats.steps_ahead == 0
    assert engines[1].stats.steps_ahead > 10
    assert engines[1].stats.graph_replays > 10


def test_constrained_requests_are_replayed_and_launched_ahead(tmp_path: Path) -> None:
    """Excluded tokens and penalties beside free requests: the tokens of steps that wait."""
    model = make_tiny(tmp_path)
    settings = {"device": "cuda", "kv_cache_config": {"tokens_per_block": 4}}
    prompts = [[random.randrange(97) for _ in range(length)] for length in (5, 17, 9, 11)]
    each = [
        {"allowed_token_ids": list(range(10, 60))},
        {},
        {"min_tokens": 20, "stop_token_ids": list(range(0, 97, 3))},
        {"repetition_penalty": 1.3},
    ]
    answers, stats = [], []
    for overlap in (False, True):
        engine = model.engine(overlap=overlap, **settings)
        for chosen in (each, each[:3]):
            outputs = [
                engine.submit(prompt, SamplingParams(max_tokens=30, seed=at, **one))[0]
                for at, (prompt, one) in enumerate(zip(prompts, chosen, strict=False))
            ]
            engine.run()
            answers.append([output.generated for output in outputs])
        stats.append(engine.stats)
    assert answers[0] == answers[2]
    assert answers[1] == answers[3]
    assert set(answers[0][0]) <= set(range(10, 60))
    assert (stats[0].steps_ahead, stats[1].steps_ahead > 20) == (0, True)
    assert stats[1].graph_replays > 20
