"""The plan from a config alone against what a run of the same config allocates."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from onboard.cache.budget import Limits, MemoryPlan
from onboard.cache.resources import KVPagedResource
from onboard.cli.documents import PlanDocument
from onboard.cli.main import run
from onboard.config import RuntimeConfig
from onboard.errors import OnboardError, UsageError
from onboard.gpu import gib
from onboard.gpu_kinds import Gpus, known_gpus, parse_gpus, parse_size
from onboard.graph.export.layer_kinds import Stack
from onboard.graph.export.left_out import Occurrences
from onboard.graph.factory import ModelFactory
from onboard.runtime.build import build_engine
from onboard.runtime.plan import plan_memory
from tests.support.drawing import some_of

_BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_HYBRID = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 16},
    "gemma3_text": {"sliding_window": 16},
    "deepseek_v3": _MLA,
    "mixtral": {"num_local_experts": 4},
    "qwen3_next": _HYBRID,
}
_LAYERS = {
    "llama": 7,
    "gemma2": 9,
    "gemma3_text": 13,
    "deepseek_v3": 7,
    "mixtral": 5,
    "qwen3_next": 17,
}
"""So many that a plan leaves some of them out."""
LIMITS = {
    "max_seq_len": 100,
    "max_batch_size": 3,
    "max_num_tokens": 24,
    "kv_cache_config": {"tokens_per_block": 4},
}


def _config(folder: Path, family: str, **options: Any) -> Path:
    AutoConfig.for_model(family, **{**_BASE, **options}).save_pretrained(folder)
    return folder


def _plan(
    checkpoint: Path, memory: int = 2**40, *, gpu: bool = False, **runtime: Any
) -> MemoryPlan:
    config = RuntimeConfig.model_validate({"dtype": "float32", **LIMITS, **runtime})
    return plan_memory(checkpoint, config, memory, gpu=gpu)[0]


@pytest.mark.parametrize("family", some_of(MODELS, always=("gemma2",), by_chance=1))
def test_the_plan_is_what_a_run_allocates(family: str, tmp_path: Path) -> None:
    checkpoint = _config(
        tmp_path, family, **MODELS[family] | {"num_hidden_layers": _LAYERS[family]}
    )
    plan = _plan(checkpoint)
    runtime = RuntimeConfig.model_validate(
        {"device": "cpu", "dtype": "float32", "skip_loading_weights": True, **LIMITS}
    )
    engine = build_engine(checkpoint, runtime)
    weights = {each.data_ptr(): each.nbytes for each in engine.gm.parameters()}
    assert plan.weights == sum(weights.values())
    assert plan.tables == sum(each.nbytes for each in engine.gm.buffers())
    assert plan.caches == sum(each.nbytes for each in engine.cache.caches.values())
    assert plan.pages == engine.cache.num_pages
    assert sum(group.num_bytes for group in plan.cache.groups(plan.pages)) == plan.caches


_REDUCED: dict[str, dict[str, Any]] = {
    "mixtral": {"num_hidden_layers": 6, "num_local_experts": 5},
    "gpt_oss": {"num_hidden_layers": 9, "num_local_experts": 6},
    "granitemoe": {"num_hidden_layers": 5, "num_local_experts": 4},
    "llama": {"num_hidden_layers": 7, "tie_word_embeddings": True},
    "gemma3_text": {"num_hidden_layers": 13, "sliding_window": 16},
    "deepseek_v3": _MLA | {"num_hidden_layers": 7},
    "qwen3_next": _HYBRID | {"num_hidden_layers": 17},
    "mamba": {"num_hidden_layers": 5},
}


@pytest.mark.parametrize("family", some_of(_REDUCED, always=("mixtral", "gpt_oss"), by_chance=0))
def test_a_few_layers_and_experts_say_what_all_of_them_take(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = _config(tmp_path, family, **_REDUCED[family])
    config = RuntimeConfig.model_validate({"dtype": "float32", **LIMITS})
    built = []
    build = ModelFactory.build_model
    monkeypatch.setattr(
        ModelFactory, "build_model", lambda *args: built.append(build(*args)) or built[-1]
    )
    (quick, facts), (whole, same) = (
        plan_memory(checkpoint, config, 2**30, gpu=True, reduced=reduced)
        for reduced in (True, False)
    )
    # Weights, tables, activations, graphs: to the byte
    assert replace(quick, cache=whole.cache) == whole
    assert Counter(quick.cache.resources) == Counter(whole.cache.resources)
    # A transform counts the layers of its own graph
    assert [re.sub(r"\d+", "", fact) for fact in facts] == [
        re.sub(r"\d+", "", fact) for fact in same
    ]
    assert not any("by itself" in fact for fact in facts)
    few, all_of_them = (len(list(model.modules())) for model in built)  # each is built once
    in_lists = any("experts." in name for name, _ in built[-1].named_modules())
    assert few < all_of_them if in_lists else few == all_of_them


@pytest.mark.exhaustive
def test_experts_that_are_not_stacked_are_planned_one_by_one(tmp_path: Path) -> None:
    checkpoint = _config(tmp_path, "mixtral", num_local_experts=5)
    off = {key: {"enabled": False} for key in ("stack_expert_weights", "fuse_moe")}
    config = RuntimeConfig.model_validate({"dtype": "float32", **LIMITS, "transforms": off})
    plan, facts = plan_memory(checkpoint, config, 2**30, gpu=False)
    assert plan.parameters == sum(each.numel() for each in _reference(checkpoint).parameters())
    assert any("planned by itself" in fact for fact in facts)


def test_the_last_exported_layer_of_a_kind_stands_for_those_that_were_left_out() -> None:
    occurrences = Occurrences(Stack("model.layers", (0, 1, 1, 1, 1, 0, 2, 1)))
    assert [occurrences.of_layer(index) for index in (0, 1, 2, 3, 5, 6, None)] == [
        1,
        1,
        1,
        3,
        1,
        1,
        1,
    ]
    assert occurrences.of_tensor("model.layers.3.mlp.weight") == 3
    assert (
        occurrences.of_tensor("other.model.layers.3.weight")
        == occurrences.of_tensor("lm_head.weight")
        == 1
    )


def test_a_model_that_was_not_onboarded_is_planned_as_that_of_transformers(tmp_path: Path) -> None:
    checkpoint = _config(tmp_path, "helium")
    config = RuntimeConfig.model_validate({"dtype": "bfloat16", **LIMITS})
    plan, facts = plan_memory(checkpoint, config, 2**30, gpu=False)
    expected = sum(each.numel() for each in _reference(checkpoint).parameters())
    assert (plan.parameters, plan.weights) == (expected, 2 * expected)
    assert any("not onboarded" in fact for fact in facts)


def _reference(checkpoint: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(checkpoint)
        )
    return model


def test_activations_are_those_of_the_largest_step(tmp_path: Path) -> None:
    checkpoint = _config(tmp_path, "llama", intermediate_size=4096)
    small, large = (_plan(checkpoint, max_num_tokens=tokens).activations for tokens in (32, 64))
    # Float32, the largest tensor of a step, which the product and its parts join
    gate_and_up = 2 * 64 * 4096 * 4
    assert gate_and_up < large < 2.2 * gate_and_up
    assert large == pytest.approx(2 * small, rel=0.01)


def test_what_is_said_to_fit_does_and_one_more_does_not(tmp_path: Path) -> None:
    plan = _plan(_config(tmp_path, "llama"), memory=4 * 2**20, max_num_tokens=4096)
    batch = plan.largest_batch(128)
    assert 1 < batch < 4096
    assert plan.for_limits(batch=batch, context=128).fits()
    assert not plan.for_limits(batch=batch + 1, context=128).fits()
    chosen = plan.for_limits(batch=batch, context=128)
    assert chosen.total <= chosen.memory


def test_the_command_says_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = str(_config(tmp_path, "llama"))
    arguments = ["--gpu", "80GiB", "--context", "128", "--batch", "2"]
    assert run(["plan", checkpoint, *arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    PlanDocument.model_validate(document)
    assert document["limits"]["max_batch_size"] == 2
    assert document["memory"] == 80 * 2**30
    assert document["total"] <= document["memory"]
    assert document["fits"]
    assert run(["plan", checkpoint, *arguments]) == 0
    text = capsys.readouterr().out
    assert f"{document['parameters']:,} parameters" in text
    assert "sequences that fit" in text
    (cache,) = document["groups"]
    assert re.search(r"\d+ caches of \d+ heads of size \d+,", " ".join(text.split())), text
    assert f"{cache['units']:,} pages of 32 tokens" in " ".join(text.split())


def test_a_cache_of_float8_takes_half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = str(_config(tmp_path, "llama"))
    limits = ["--context", "128", "--batch", "8"]
    arguments = ["plan", checkpoint, "--gpu", "1GiB", "--dtype", "bfloat16", "--json", *limits]
    sizes = []
    for options in ([], ["--cache-dtype", "float8_e4m3fn"]):
        assert run([*arguments, *options]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["caches"])
    assert sizes[0] == 2 * sizes[1] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "200MiB"], "does not fit in 200 MiB"),
        (["--gpu", "800MiB", "--batch", "2000", "--context", "256"], "At most"),
    ],
)
def test_what_does_not_fit_is_one_line_and_exit_code_3(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(_config(tmp_path, "llama")), *arguments]) == 3
    captured = capsys.readouterr()
    assert "parameters" in captured.out
    assert "GPUs for" in captured.out
    assert "…" not in captured.out  # a bar that is too long would be cut, and narrow the words
    assert captured.err.count("\n") == 1
    assert said in captured.err


def test_sizes() -> None:
    assert [parse_size(text) for text in ("80GiB", "80 gb", "0.5", "512MiB")] == [
        80 * 2**30,
        80 * 10**9,
        2**29,
        2**29,
    ]
    assert [gib(size) for size in (80 * 2**30, 3 * 2**29, 2**20)] == [
        "80.0 GiB",
        "1.50 GiB",
        "1.00 MiB",
    ]
    h200 = known_gpus()["H200"]
    words = {
        "h100": (1, known_gpus()["H100"]),
        "4xH200": (4, h200),
        "2 x 80GiB": (2, 80 * 2**30),
        "24": (1, 24 * 2**30),
    }
    assert {text: parse_gpus(text) for text in words} == {
        text: Gpus(*pair) for text, pair in words.items()
    }
    for text in ("", "much", "80 apples", "0GiB", "0xH100", "4x"):
        with pytest.raises(UsageError):
            parse_gpus(text)


def test_several_gpus_share_weights_and_caches_and_nothing_else(tmp_path: Path) -> None:
    plan, _ = plan_memory(
        _config(tmp_path, "llama"), RuntimeConfig(max_batch_size=4, max_seq_len=64), 2**33, gpu=True
    )
    four = plan.over(4, 2**33)
    own = plan.tables + plan.inputs + plan.activations + plan.reserve
    assert (four.memory, four.fixed) == (4 * 2**33, plan.weights + 4 * own)
    assert four.cache == plan.cache
    assert four.over(1, 2**33) == plan
    for memory in (plan.fixed // 2, plan.fixed + 2**20, 2**34):
        count = plan.devices_needed(memory)
        assert count == four.devices_needed(memory)
        if count is None:
            assert plan.reserve + plan.activations > memory * 0.5
        else:
            assert plan.over(count, memory).fits()
            assert count == 1 or not plan.over(count // 2, memory).fits()
        of_ranks = replace(plan, ranks=3).devices_needed(memory)
        assert of_ranks == (3 if count == 1 else None)  # no two devices share a rank


def test_a_config_file_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _config(tmp_path, "llama") / "config.json"
    words = ["plan", "--gpu", "2xL4", "--context", "64", "--json"]
    assert run([*words, str(file.rename(tmp_path / "shapes.json"))]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["memory"] == 2 * known_gpus()["L4"]
    assert document["gpus_needed"]["H100"] == 1
    assert any("split evenly over 2 GPUs" in fact for fact in document["facts"])


def test_every_holder_of_a_state_has_a_slot_of_its_own() -> None:
    limits = Limits(max_batch_size=3, max_seq_len=64, max_num_tokens=16, page_size=4, snapshots=2)
    spare, batch, kept, alone = {0}, {1, 2, 3}, {4, 5}, {6}
    assert limits.num_slots == len(spare | batch | kept | alone)


def test_captured_sizes_share_the_memory_of_the_largest(tmp_path: Path) -> None:
    checkpoint = _config(tmp_path, "llama")
    sizes = {"max_batch_size": 7, "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 400}}
    one, three = (
        _plan(
            checkpoint,
            gpu=True,
            **sizes,
            max_num_tokens=tokens,
            cuda_graph_config={"batch_sizes": each},
        ).graphs
        # A prompt's tokens are in no captured step
        for each, tokens in (
            ([7], 24),
            ([2, 3, 7], 48),
        )
    )
    assert three == one > 7 * _BASE["vocab_size"] * 4  # its logits, float32


def test_pages_are_as_many_as_can_be_in_use() -> None:
    limits = Limits(max_batch_size=3, max_seq_len=30, max_num_tokens=16, page_size=4)
    assert limits.useful_pages == 1 + 3 * 8
    assert replace(limits, max_tokens=45).useful_pages == 1 + 12
    assert replace(limits, max_tokens=1000).useful_pages == 1 + 3 * 8
    # A query sees 5 earlier tokens of its window in 2 pages, begun and ended anywhere in one: 4; of
    # a batch and of one alone; and a step brings 16 tokens.
    assert limits.window_pages(6) == 1 + (3 + 1) * 4 + 4


def test_a_budget_is_used_to_the_last_byte(tmp_path: Path) -> None:
    caches = _plan(_config(tmp_path, "llama")).cache
    for pages in (1, 2, caches.limits.useful_pages):
        assert caches.pages_within(caches.num_bytes(pages)) == pages
        assert caches.pages_within(caches.num_bytes(pages) - 1) == pages - 1


def test_the_longest_context_is_the_last_that_fits_and_no_longer_than_the_models(
    tmp_path: Path,
) -> None:
    checkpoint = _config(tmp_path, "llama")
    roomy = _plan(checkpoint, kv_cache_config={"tokens_per_block": 3})
    assert roomy.positions == roomy.longest_context() == _BASE["max_position_embeddings"]
    plan = _plan(checkpoint, memory=_plan(checkpoint).for_limits(batch=1, context=80).total)
    longest = plan.longest_context()
    assert 0 < longest < _BASE["max_position_embeddings"]
    assert plan.for_limits(batch=1, context=longest).fits()
    assert not plan.for_limits(batch=1, context=longest + 4).fits()


def test_a_step_has_no_more_tokens_than_its_sequences() -> None:
    limits = Limits(max_batch_size=3, max_seq_len=30, max_num_tokens=16, page_size=4)
    assert [replace(limits, max_num_tokens=tokens).most_tokens for tokens in (16, 1000)] == [16, 90]


def test_a_window_that_no_sequence_outgrows_is_none() -> None:
    limits = Limits(max_batch_size=3, max_seq_len=30, max_num_tokens=16, page_size=4)
    caches = [KVPagedResource(2, 8, torch.float32, 4, window) for window in (None, 6, 29, 30, 99)]
    assert [limits.window(each) for each in caches] == [None, 6, 29, None, None]


def test_a_model_that_would_forget_is_not_planned(tmp_path: Path) -> None:
    checkpoint = _config(tmp_path, "llama", num_hidden_layers=1)
    with pytest.raises(OnboardError, match="attention calls have no cache"):
        _plan(checkpoint, transforms={"insert_cached_attention": {"enabled": False}})
