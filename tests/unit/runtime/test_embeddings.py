"""Vectors of texts: those of transformers' last hidden states."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard import LLM, AsyncLLM, SamplingParams
from onboard.errors import UsageError
from tests.support.runtime.tiny import Tiny


@torch.no_grad()
def theirs(model: Tiny, ids: list[int]) -> torch.Tensor:
    """The last hidden states of transformers' model, [tokens, hidden]."""
    return model.hf.base_model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]


STATES = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2}


@pytest.mark.parametrize(("family", "sizes"), [("llama", {}), ("gpt2", {}), ("mamba2", STATES)])
def test_vectors_are_of_transformers_states(
    tiny: Callable[..., Tiny], family: str, sizes: dict[str, int]
) -> None:
    """Of texts of one token, of some chunks, and behind texts that were generated."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    model = tiny(family, own_file=False, **sizes)
    llm = LLM(model.checkpoint, root=model.root, device="cpu", dtype="float32",
              settings={"max_seq_len": 128, "max_num_tokens": 16})  # fmt: skip
    texts = [[rng.randrange(64) for _ in range(length)] for length in (1, 5, 40)]
    llm.generate(texts, SamplingParams(max_tokens=4, ignore_eos=True))
    found = {
        (pooling, normalize): llm.embed(texts, pooling, normalize=normalize)
        for pooling in ("last", "mean")
        for normalize in (True, False)
    }
    for row, ids in enumerate(texts):
        states = theirs(model, ids)
        for (pooling, normalize), vectors in found.items():
            expected = states[-1] if pooling == "last" else states.mean(0)
            expected = expected / expected.norm() if normalize else expected
            assert torch.allclose(vectors[row], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(UsageError, match="pooling is 'most'"):
        llm.embed([1], "most")  # type: ignore[arg-type]


def test_a_model_without_a_graph_gives_none(tiny: Callable[..., Tiny]) -> None:
    model = tiny()
    llm = LLM(model.checkpoint, root=model.root, device="cpu", mode="transformers")
    with pytest.raises(UsageError, match="without a graph"):
        llm.embed([1, 2])
    assert llm.generate([[1, 2]], SamplingParams(max_tokens=2))[0].token_ids


def test_texts_wait_for_room_beside_running_requests(tiny: Callable[..., Tiny]) -> None:
    """The caches have room for one long request: the text is read when it has ended."""
    model = tiny(max_position_embeddings=64)
    settings = {"max_seq_len": 64, "max_batch_size": 1,
                "kv_cache_config": {"max_tokens": 64, "tokens_per_block": 4}}  # fmt: skip
    many = AsyncLLM(
        model.checkpoint, root=model.root, device="cpu", dtype="float32", settings=settings
    )
    ids = list(range(1, 31))

    async def main() -> tuple[Any, torch.Tensor]:
        async with many:
            params = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0.0)
            long = asyncio.ensure_future(many.generate(list(range(40)), params))
            vector = await many.embed(ids, normalize=False)
            return await long, vector

    output, vector = asyncio.run(main())
    assert output.token_ids == model.greedy(list(range(40)), 24)
    assert torch.allclose(vector, theirs(model, ids)[-1], rtol=1e-4, atol=1e-5)


def test_outputs_of_one_prompt_share_its_prefill(tiny: Callable[..., Tiny]) -> None:
    """Of 35 tokens, pages of 4: the first output computes all, each other one what is behind the
    last whole page.
    """
    model = tiny()
    engine = model.engine(max_batch_size=4, max_num_tokens=64)
    prompt = [token % 60 for token in range(35)]
    outputs = engine.submit(prompt, SamplingParams(n=4, max_tokens=5, temperature=0.0))
    engine.run()
    assert engine.stats.prompt_tokens == 35 + 3 * 3
    assert engine.stats.reused_tokens == 3 * 32
    assert [each.generated for each in outputs] == [model.greedy(prompt, 5)] * 4
