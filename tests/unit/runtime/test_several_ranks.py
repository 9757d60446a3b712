"""One model on several ranks, led by this process: the same tokens as on one, whatever is asked of
it. The ranks are started once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from onboard import LLM, SamplingParams
from onboard.errors import OnboardError, UsageError
from onboard.parallel.workers import Workers
from onboard.runtime.ranks.following import ready
from onboard.runtime.ranks.leading import kept_workers
from onboard.testing.prompts import ragged_prompts
from onboard.verify.error import rmse_ratio
from tests.support.runtime.adapters import make_adapter
from tests.support.runtime.tiny import Tiny
from tests.support.sharding.zoo import ROOT, save_family

LIMIT = 1e-5
"""Of the root mean square error, relative to the expected values."""
SETTINGS: dict[str, Any] = {
    "max_seq_len": 64,
    "max_batch_size": 4,
    "max_num_tokens": 32,
    "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 256, "state_snapshots": 16},
}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "one key head for all ranks, tied head": ("gemma3_text", {}),
    "latent attention, shared experts": ("deepseek_v3", {}),
    "selective scan": ("mamba", {}),
    "gated delta rule, gated shared expert": ("qwen3_next", {}),
}
Saved = Callable[..., Path]
Load = Callable[..., LLM]


@pytest.fixture(scope="module")
def seed() -> int:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    return seed


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """The ranks keep graphs: a model that is loaded again starts from these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONBOARD_CACHE", str(tmp_path_factory.mktemp("graphs")))
        with kept_workers(2) as workers:
            yield workers


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Saved:
    @cache
    def save(family: str, **changed: Any) -> Path:
        return save_family(tmp_path_factory.mktemp("family"), family, seed, **changed)

    return save


def load(checkpoint: Path, world_size: int, **settings: Any) -> LLM:
    lora = settings.pop("lora", None)
    told = SETTINGS | settings
    return LLM(checkpoint, ROOT, device="cpu", world_size=world_size, settings=told, lora=lora)


def tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate(prompts, params)
    return [list(each.token_ids) for output in outputs for each in output.outputs]


def run(llm: LLM, seed: int) -> list[list[int]]:
    """More sequences than fit at a time, and then prompts that begin as earlier ones do."""
    vocabulary = int(llm.engine.vocab_size or 0)
    prompts = ragged_prompts(vocabulary, (3, 17, 1, 29, 40, 21), seed)
    first = tokens(llm, prompts, GREEDY)
    again = [[*prompt, *new[:3]] for prompt, new in zip(prompts, first, strict=True)]
    drawn = SamplingParams(max_tokens=6, temperature=1.5, top_p=0.9, seed=seed, ignore_eos=True)
    return [*first, *tokens(llm, again, drawn)]


@pytest.mark.drawn(few=3)
@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_choose_the_tokens_of_one(
    workers: Workers, saved: Saved, seed: int, name: str
) -> None:
    family, changed = FAMILIES[name]
    checkpoint = saved(family, **changed)
    alone = load(checkpoint, 1)
    with load(checkpoint, 2) as both:
        assert run(both, seed) == run(alone, seed)
        assert both.engine.stats.reused_tokens == alone.engine.stats.reused_tokens
        assert both.engine.stats.reused_tokens or family == "gemma3_text"  # windows move on
        assert both.ranks is not None
        shares = both.ranks.shares
    whole = ready(alone.engine)
    assert len(shares) == 2
    for share in shares:
        assert share.weight_bytes < 0.75 * whole.weight_bytes
        assert 0 < share.bytes_read < 0.75 * whole.bytes_read


@pytest.fixture(scope="module")
def llama(saved: Saved) -> Path:
    """Fewer key heads than ranks."""
    return saved("llama", num_key_value_heads=1)


@pytest.fixture(scope="module")
def alone(llama: Path) -> LLM:
    return load(llama, 1)


@pytest.fixture(scope="module")
def expected(alone: LLM, seed: int) -> list[list[int]]:
    return run(alone, seed)


def test_whatever_is_asked_of_a_model_several_ranks_answer(
    workers: Workers, llama: Path, alone: LLM, expected: list[list[int]], seed: int
) -> None:
    with load(llama, 2) as both:
        [prompt] = ragged_prompts(int(alone.engine.vocab_size or 0), (20,), seed)
        assert rmse_ratio(both.logits(prompt), alone.logits(prompt)) < LIMIT
        asked = {"logprobs": 3, "prompt_logprobs": 2, "frequency_penalty": 0.5, "n": 2}
        params = SamplingParams(max_tokens=6, temperature=0.8, seed=seed, **asked)
        [ours], [theirs] = (llm.generate([prompt], params) for llm in (both, alone))
        assert [each.token_ids for each in ours.outputs] == [
            each.token_ids for each in theirs.outputs
        ]
        assert [delta.token_ids for delta in both.stream(prompt, GREEDY)] == [
            delta.token_ids for delta in alone.stream(prompt, GREEDY)
        ]
        with pytest.raises(UsageError, match="a prompt has no tokens"):
            both.generate([[]], GREEDY)
        assert run(both, seed) == expected


def test_steps_launched_ahead_read_the_tokens_that_the_first_rank_chose(
    workers: Workers, llama: Path, expected: list[list[int]], seed: int
) -> None:
    """The other rank's input ids are placeholders then."""
    with load(llama, 2, overlap=True) as both:
        found = run(both, seed)
        assert both.engine.stats.steps_ahead > 0
    assert found == expected


def test_tokens_chosen_again_by_the_first_rank_are_read_by_steps_launched_ahead(
    workers: Workers, llama: Path, alone: LLM, seed: int
) -> None:
    """The other rank has heard of the first choice when the second one is made."""
    prompts = ragged_prompts(int(alone.engine.vocab_size or 0), (3, 17, 9), seed)
    odd = list(range(1, int(alone.engine.vocab_size or 0), 2))
    params = [
        GREEDY.model_copy(update={"repetition_penalty": 1.4}),
        GREEDY,
        GREEDY.model_copy(update={"allowed_token_ids": odd}),
    ]
    expected = [output.token_ids for output in alone.generate(prompts, params)]
    with load(llama, 2, overlap=True) as both:
        found = [output.token_ids for output in both.generate(prompts, params)]
        assert both.engine.stats.steps_ahead > 0
    assert found == expected


@pytest.mark.parametrize(
    "targets", [["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "down_proj"]]
)
def test_adapters_are_divided_as_their_layers_are(
    workers: Workers, saved: Saved, seed: int, targets: list[str], tmp_path: Path
) -> None:
    """Each request with its adapter, beside one without, as transformers' model with the adapter
    merged has them; fewer key heads than ranks.
    """
    checkpoint = saved("llama", num_key_value_heads=1)
    hf = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    base = Tiny(checkpoint, ROOT, hf.eval())
    made = {
        name: make_adapter(tmp_path / name, base, targets, 4 + at) for at, name in enumerate("ab")
    }
    prompts = ragged_prompts(hf.config.vocab_size, (5, 17, 9), seed)
    names = ["a", None, "b"]
    with load(checkpoint, 2, lora={name: str(each.folder) for name, each in made.items()}) as both:
        found = both.generate(prompts, GREEDY, lora=names)
        logits = [both.logits(each, name) for each, name in zip(prompts, names, strict=True)]
    for at, name in enumerate(names):
        source = base if name is None else made[name]
        assert rmse_ratio(logits[at], source.logits(prompts[at])) < LIMIT
        assert found[at].token_ids == source.greedy(prompts[at], 6)
    assert rmse_ratio(logits[0], base.logits(prompts[0])) > 100 * LIMIT


def test_requests_that_lose_their_pages_come_back(
    workers: Workers, llama: Path, expected: list[list[int]], seed: int
) -> None:
    few = {"kv_cache_config": {"tokens_per_block": 4, "max_tokens": 64}}
    with load(llama, 2, **few) as both:
        found = run(both, seed)
        assert both.engine.stats.preemptions > 0
    assert found == expected


def test_a_model_is_given_up_for_another(workers: Workers, llama: Path) -> None:
    first = load(llama, 2)
    first.close()
    with pytest.raises(OnboardError, match="closed"):
        first.generate([[1, 2]], GREEDY)
    with load(llama, 2) as second:
        assert tokens(second, [[1, 2]], GREEDY)
