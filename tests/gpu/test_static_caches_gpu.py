"""Static caches v1 and v2, and pages, give on a GPU the greedy tokens of transformers on that GPU."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard import LLM, SamplingParams
from onboard.runtime.static.static_llm import StaticLLM
from tests.support.runtime.greedy_tokens import GreedyTokens, greedy_tokens
from tests.support.runtime.tiny import Tiny, make_tiny
from tests.support.static.models import HARDER, MODELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOKENS = 24
# Sums in another order move float32 logits of this size by some 1e-5.
TIE = 5e-4
# Of heads that kernels take; the models' own options have smaller ones.
SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}


def _greedy(tiny: Tiny, prompt: list[int]) -> GreedyTokens:
    """Return transformers' tokens, each from a full pass on the GPU."""
    hf = tiny.hf.to("cuda")

    @torch.no_grad()
    def logits(ids: list[int]) -> torch.Tensor:
        return hf(torch.tensor([ids], device="cuda"), use_cache=False).logits[0].cpu()

    return greedy_tokens(logits, prompt, TOKENS, TIE)


def _sized(options: dict[str, Any]) -> dict[str, Any]:
    heads = {"head_dim": 32} if "head_dim" in options else {}
    return {**SIZES, **options, **heads}


@pytest.mark.parametrize("name", [*MODELS, *HARDER])
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model_type, options = {**MODELS, **HARDER}[name]
    tiny = make_tiny(tmp_path, model_type, own_file=False, **_sized(options))
    seed = random.randrange(2**31)
    print(f"prompts seed {seed}")
    draw = random.Random(seed)
    # Longer than the windows, which are 4 or 5, as long as one, and one token
    prompts = [[draw.randrange(3, 500) for _ in range(size)] for size in (70, 5, 1)]
    expected = [_greedy(tiny, prompt) for prompt in prompts]
    assert sum(each.sure for each in expected) > TOKENS, "ties: nothing was compared"
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    where: dict[str, Any] = {"root": tiny.root, "device": "cuda", "dtype": "float32"}
    for form in ("static_v1", "static_v2"):
        outputs = StaticLLM(tiny.checkpoint, form, **where).generate(prompts, params)
        assert [output.token_ids for output in outputs] == expected, form
    outputs = LLM(tiny.checkpoint, **where).generate(prompts, params)
    assert [output.token_ids for output in outputs] == expected, "paged"
