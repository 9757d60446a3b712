"""Limits that nobody asked for: by the model, the device and its memory; those asked for are kept
or refused.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from onboard import LLM, SamplingParams
from onboard.cache.budget import STARTING_TOKENS, CachePlan, Limits
from onboard.cache.resources import CacheResource, KVPagedResource, StateResource
from onboard.cli.documents import PlanDocument, RunDocument
from onboard.cli.main import run
from onboard.config import RuntimeConfig
from onboard.errors import UsageError
from onboard.hf.architecture import text_config
from onboard.runtime.limits import ENDLESS, ON_CPU, ON_GPU, PROOF, max_positions, settled
from onboard.runtime.plan import plan_memory
from tests.support.runtime.tiny import Tiny, make_tiny

LONG = 2048
MEMORY = "onboard.graph.cache_init.interface.available_memory"


def _config(positions: int | None = None, name: str = "max_position_embeddings") -> Any:
    return SimpleNamespace(**({} if positions is None else {name: positions}))


@pytest.mark.parametrize(
    ("asked", "positions", "first", "expected"),
    [
        (None, 40960, 0, 40960),
        (None, 514, 2, 512),
        (None, None, 0, ENDLESS),
        (77, 40960, 0, 77),
        (100_000, None, 0, 100_000),
        (514, 514, 2, 512),  # the positions themselves are meant
    ],
)
def test_a_sequence_is_as_long_as_model_and_user_allow(
    asked: int | None, positions: int | None, first: int, expected: int
) -> None:
    found, chosen = settled(RuntimeConfig(max_seq_len=asked), _config(positions), first, ON_GPU)
    assert found.max_seq_len == expected
    assert ("max_seq_len" in chosen) == (asked is None)


def test_a_longer_sequence_than_the_models_is_refused() -> None:
    with pytest.raises(UsageError, match="max_seq_len is 513 and the model has 512 positions"):
        settled(RuntimeConfig(max_seq_len=513), _config(514), 2, ON_GPU)


def test_positions_are_those_of_the_text_whatever_they_are_called() -> None:
    assert max_positions(_config(2048, "max_seq_len")) == 2048
    text = {"model_type": "llama", "max_position_embeddings": 77}
    multimodal = AutoConfig.for_model("llava", text_config=text)
    assert (max_positions(multimodal), max_positions(text_config(multimodal))) == (None, 77)
    scaled = {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
    }
    config = AutoConfig.for_model("llama", max_position_embeddings=256, rope_parameters=scaled)
    assert max_positions(config) == 256, "as transformers reads it, which is where tables end"


def test_a_device_takes_what_it_has_room_for_unless_somebody_says_so() -> None:
    found, chosen = settled(RuntimeConfig(), _config(40960), 0, ON_GPU)
    assert (found.max_batch_size, found.max_num_tokens, found.kv_cache_config.max_tokens) == (
        256,
        8192,
        None,
    )
    assert chosen == {"max_seq_len", "max_batch_size", "max_num_tokens"}
    found, chosen = settled(RuntimeConfig(), _config(40960), 0, ON_CPU)
    assert (found.max_batch_size, found.max_num_tokens, found.kv_cache_config.max_tokens) == (
        8,
        2048,
        8 * 1024,
    )
    assert "max_tokens" in chosen
    found, chosen = settled(
        RuntimeConfig(max_seq_len=20_000, max_num_tokens=64), _config(40960), 0, ON_CPU
    )
    assert (found.max_num_tokens, found.kv_cache_config.max_tokens) == (64, 20_000), (
        "room for one at least"
    )
    found, chosen = settled(
        RuntimeConfig(max_seq_len=2000, max_batch_size=99), _config(40960), 0, ON_CPU
    )
    assert (found.kv_cache_config.max_tokens, chosen) == (None, {"max_num_tokens"}), (
        "room for all that was asked for"
    )
    own = RuntimeConfig.model_validate(
        {"max_batch_size": 9000, "kv_cache_config": {"max_tokens": 5}}
    )
    found, chosen = settled(own, _config(40960), 0, ON_CPU)
    assert (found.max_num_tokens, found.kv_cache_config.max_tokens) == (9000, 5), "a token of each"
    assert "max_tokens" not in chosen
    assert settled(RuntimeConfig(), _config(40960), 0, PROOF)[0].max_seq_len == 512
    assert settled(RuntimeConfig(), _config(96), 0, PROOF)[0].max_seq_len == 96


RESOURCES: dict[str, list[CacheResource]] = {
    "pages": [KVPagedResource(2, 8, torch.float32, 4)],
    "windows": [
        KVPagedResource(2, 8, torch.float32, 4),
        KVPagedResource(2, 8, torch.float32, 4, 16),
    ],
    "window alone": [KVPagedResource(2, 8, torch.float32, 4, 16)],
    "states": [StateResource((64, 64), torch.float32)],
    "both": [KVPagedResource(2, 8, torch.float32, 4), StateResource((64, 64), torch.float32)],
}


def _plan(kind: str, **limits: int) -> CachePlan:
    sizes = {
        "max_batch_size": 256,
        "max_seq_len": 4096,
        "max_num_tokens": 64,
        "page_size": 4,
        "snapshots": 256,
    }
    return CachePlan(Limits(**{**sizes, **limits}), tuple(RESOURCES[kind]))


@pytest.mark.parametrize("kind", RESOURCES)
def test_a_batch_is_the_largest_that_can_start(kind: str) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    for budget in (0, random.Random(seed).randrange(2**25), 2**40):
        batch = _plan(kind).fitting_batch(budget)

        def takes(count: int) -> int:
            plan = _plan(kind, max_batch_size=count, snapshots=count, max_seq_len=STARTING_TOKENS)
            return plan.num_bytes(1 + count * STARTING_TOKENS // 4)

        assert batch == 1 or takes(batch) <= budget
        assert batch == 256 or takes(batch + 1) > budget


def test_a_sequence_that_has_all_pages_to_itself() -> None:
    assert [_plan("pages").longest(pages) for pages in (1, 11, 5000)] == [0, 40, 4 * 4999]
    assert _plan("windows").longest(11) == 40
    assert _plan("window alone").longest(11) == 4096, "more than a window's pages hold any number"
    assert _plan("window alone").longest(5) == 16
    assert _plan("states").longest(11) == 4096


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A checkpoint with more positions than any default was once made for."""
    return make_tiny(tmp_path_factory.mktemp("long"), max_position_embeddings=LONG)


def _greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def test_long_prompts_are_read_where_nobody_asks_for_limits(
    long: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    ids = [draw.randrange(97) for _ in range(700)]
    llm = LLM(long.checkpoint, root=long.root, device="cpu", dtype="float32")
    assert llm.engine.limits == {"max_seq_len": LONG, "max_batch_size": 8, "max_num_tokens": 2048}
    assert not [fact for fact in llm.engine.facts if "->" in fact]
    outputs = llm.generate([ids, ids[:9]], _greedy(2))
    assert [each.token_ids for each in outputs] == [long.greedy(ids, 2), long.greedy(ids[:9], 2)]
    torch.testing.assert_close(llm.logits(ids), long.logits(ids), rtol=1e-4, atol=1e-4)
    capsys.readouterr()
    words = ["run", str(long.checkpoint), "--root", str(long.root), "--device", "cpu", "--json"]
    assert run([*words, "--token-ids", ",".join(map(str, ids)), "--max-tokens", "1"]) == 0
    document = RunDocument.model_validate(json.loads(capsys.readouterr().out))
    assert document.limits == llm.engine.limits


def test_what_memory_does_not_hold_is_lowered_and_said_or_refused(
    long: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = 32 * 2 * 2 * 2 * 8 * 4  # keys and values of two layers and heads, float32
    monkeypatch.setattr(MEMORY, lambda: 149 * page)
    llm = LLM(long.checkpoint, root=long.root, device="cpu", dtype="float32")
    held = 1 + LONG // 32  # before the caches had their size
    assert llm.engine.capacity == 1664 == 32 * ((149 + held) // 4 - 1), "a quarter; a page is spare"
    [fact] = [fact for fact in llm.engine.facts if fact.startswith("max_seq_len")]
    assert fact.startswith("max_seq_len 2,048 -> 1,664: what a cache of")
    [fact] = [fact for fact in llm.engine.facts if fact.startswith("max_batch_size")]
    assert fact.startswith("max_batch_size 8 -> 2: ")
    assert llm.engine.limits["max_batch_size"] == 2
    prompts = [[5, 6, 7], [8, 9], [3] * 5]
    assert [each.token_ids for each in llm.generate(prompts, _greedy(4))] == [
        long.greedy(ids, 4) for ids in prompts
    ]
    with pytest.raises(
        UsageError, match=r"max_seq_len is 2,048 and a cache of .* holds 1,664 tokens"
    ):
        LLM(
            long.checkpoint,
            root=long.root,
            device="cpu",
            dtype="float32",
            config={"max_seq_len": LONG},
        )


def test_states_bound_the_batch_and_nothing_the_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "hidden_size": 32,
        "state_size": 8,
        "num_hidden_layers": 2,
        "vocab_size": 97,
        "eos_token_id": None,
    }
    config = AutoConfig.for_model("mamba", **options, bos_token_id=None, pad_token_id=0)
    config.save_pretrained(tmp_path)
    # Of two layers: that of the scan, and the convolution's last inputs
    state = 2 * 4 * (64 * 8 + 64 * 4)
    # Three sequences, as many known beginnings, the spare one, and that of one alone
    slots = 2 * 3 + 2
    monkeypatch.setattr(MEMORY, lambda: 4 * (slots * state + 1))
    runtime = RuntimeConfig(device="cpu", dtype="float32", skip_loading_weights=True)
    llm = LLM(tmp_path, root=tmp_path, device="cpu", config=runtime)
    assert llm.engine.limits == {
        "max_seq_len": ENDLESS,
        "max_batch_size": 3,
        "max_num_tokens": 2048,
    }
    outputs = llm.generate([[number, 5] for number in range(9)], _greedy(3))
    alone = [llm.generate([number, 5], _greedy(3))[0].token_ids for number in range(9)]
    assert [each.token_ids for each in outputs] == alone


def test_a_plan_shows_what_a_run_would_settle_on(
    long: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, facts = plan_memory(
        long.checkpoint, RuntimeConfig(dtype="float32"), 80 * 2**30, gpu=True, root=long.root
    )
    limits = plan.limits
    assert (limits.max_seq_len, limits.max_batch_size, limits.max_num_tokens) == (LONG, 256, 8192)
    assert not any("->" in fact for fact in facts)
    words = ["plan", str(long.checkpoint), "--root", str(long.root), "--dtype", "float32", "--json"]
    assert run([*words, "--gpu", f"{(plan.fixed + 2**17) / 2**30}GiB"]) == 0
    document = json.loads(capsys.readouterr().out)
    PlanDocument.model_validate(document)
    longest = document["limits"]["max_seq_len"]
    assert 0 < longest < LONG
    assert any(fact.startswith(f"max_seq_len 2,048 -> {longest:,}: ") for fact in document["facts"])
    assert document["wanted"] == [1, LONG], (
        "how many GPUs are enough is asked for the model's own length"
    )
    assert document["gpus_needed"]["H100"] == 1
