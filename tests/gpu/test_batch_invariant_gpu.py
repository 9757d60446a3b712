"""`batch_invariant` on a GPU: the demo checkpoint's tokens and log-probabilities, bit for bit,
alone and in company.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard import LLM, SamplingParams
from onboard.cli.commands.demo import CHECKPOINT
from onboard.runtime.scheduling.request import Request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PARAMS = SamplingParams(max_tokens=48, temperature=0.0, logprobs=5, ignore_eos=True)
SETTINGS = {
    "max_seq_len": 256,
    "max_batch_size": 16,
    "kv_cache_config": {"enable_block_reuse": False},
}
Answer = tuple[list[int], list[dict[int, float]]]


def _load(root: Path, **config: Any) -> LLM:
    config = {"dtype": "bfloat16", "batch_invariant": True, **SETTINGS, **config}
    return LLM(CHECKPOINT, root=root, device="cuda", config=config)


def _prompts(llm: LLM, count: int = 16) -> list[list[int]]:
    """Beginnings of held-out texts, of 4 to 124 tokens."""
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    texts = (CHECKPOINT / "heldout.txt").read_text("utf-8").split("---")
    tokens = (tokenizer.encode(text) for text in texts)
    return [
        each[: 4 + 8 * index]
        for index, each in enumerate(islice((t for t in tokens if len(t) > 124), count))
    ]


def _answers(outputs: list[Request]) -> list[Answer]:
    return [(output.generated, output.logprobs) for output in outputs]


def _submit(llm: LLM, prompts: list[list[int]]) -> list[Request]:
    return [llm.engine.submit(prompt, PARAMS)[0] for prompt in prompts]


def _alone(llm: LLM, prompts: list[list[int]]) -> list[Answer]:
    outputs = []
    for prompt in prompts:
        outputs += _submit(llm, [prompt])
        llm.engine.run()
    return _answers(outputs)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, LLM, list[Answer]]:
    llm = _load(tmp_path_factory.mktemp("invariant"), dtype=request.param)
    return request.param, llm, _alone(llm, _prompts(llm))


def test_a_batch_gives_what_each_gives_alone(alone: tuple[str, LLM, list[Answer]]) -> None:
    _, llm, expected = alone
    outputs = _submit(llm, _prompts(llm))
    llm.engine.run()
    assert _answers(outputs) == expected
    assert llm.engine.stats.graph_replays > 0


def test_others_may_join(alone: tuple[str, LLM, list[Answer]]) -> None:
    _, llm, expected = alone
    prompts = _prompts(llm)
    outputs = _submit(llm, prompts[:5])
    for late in range(5, 16, 3):
        for _ in range(7):
            llm.engine.step()
        outputs += _submit(llm, prompts[late : late + 3])
    llm.engine.run()
    assert _answers(outputs[:16]) == expected


def test_chunks_prefixes_and_preemptions(
    alone: tuple[str, LLM, list[Answer]], tmp_path: Path
) -> None:
    """What decode computed is computed again in prefill, and pages that one prompt left are read by
    others.
    """
    dtype, _, expected = alone
    cache = {"enable_block_reuse": True, "max_tokens": 1024, "tokens_per_block": 16}
    llm = _load(tmp_path, dtype=dtype, max_num_tokens=40, kv_cache_config=cache)
    prompts = _prompts(llm)
    outputs = _submit(llm, prompts)
    llm.engine.run()
    again = _submit(llm, prompts)
    llm.engine.run()
    assert _answers(outputs) == expected == _answers(again)
    assert llm.engine.stats.preemptions > 0
    assert llm.engine.stats.reused_tokens > 0


def test_without_it_batches_round_differently(tmp_path: Path) -> None:
    """Else the tests above would show nothing."""
    llm = _load(tmp_path, batch_invariant=False)
    prompts = _prompts(llm)
    outputs = _submit(llm, prompts)
    llm.engine.run()
    assert _answers(outputs) != _alone(llm, prompts)
