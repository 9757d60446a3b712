"""transformers' own models, exported and eager: each type gives its own greedy tokens and
logits.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from onboard import LLM, SamplingParams
from onboard.analysis.tiny.tiny_model import build_tiny
from onboard.cli import main
from onboard.config import Mode, RuntimeConfig
from onboard.errors import OnboardError
from onboard.verify.error import rmse_ratio
from onboard.verify.transforms.stages import verify_model
from onboard.workflow.run_model import run_model as run_agent
from tests.support.drawing import some_of
from tests.support.runtime.greedy_tokens import greedy_tokens

LENGTHS = (3, 11, 26, 41)
NEW_TOKENS = 32
TYPES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 8},
    "gemma2": {},  # soft caps, windows, sandwich norms
    "gemma3_text": {},  # windows with a rotary table of their own
    "gemma4_text": {},  # windows and full attention of other head sizes
    "gpt_neox": {},  # parallel, partly rotated, fused qkv
    "phi3": {},
    "qwen3_moe": {},  # experts stacked in memory, apart in the checkpoint
    "gpt_oss": {},  # sinks
    "cohere2": {},  # layers with and without positions
    "deepseek_v3": {},  # keys longer than values
    "bart": {"decoder_layers": 2, "is_decoder": True},  # counts positions itself
}
NEEDS_A_GRAPH = {"bart"}
"""Whose positions only a graph can be given."""


def checkpoint_of(model_type: str, folder: Path) -> Path:
    build_tiny(AutoConfig.for_model(model_type, **TYPES.get(model_type, {}))).save_pretrained(
        folder
    )
    return folder


def load(checkpoint: Path, mode: Mode, **config: Any) -> LLM:
    settings = {"max_seq_len": 128, "kv_cache_config": {"tokens_per_block": 4}, **config}
    return LLM(
        checkpoint,
        root=checkpoint.parent,
        device="cpu",
        dtype="float32",
        config=settings,
        mode=mode,
    )


@torch.no_grad()
def expected(checkpoint: Path, prompts: list[list[int]]) -> list[tuple[list[int], torch.Tensor]]:
    """Return each prompt's greedy tokens, each from a full pass, and the logits of the whole."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def logits(ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([ids]), use_cache=False).logits[0]

    texts = [(prompt, greedy_tokens(logits, prompt, NEW_TOKENS)) for prompt in prompts]
    return [(tokens, logits([*prompt, *tokens])) for prompt, tokens in texts]


@pytest.mark.parametrize("model_type", some_of(TYPES, always=("llama",), by_chance=3))
def test_both_modes_are_transformers_own_model(model_type: str, tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    checkpoint = checkpoint_of(model_type, tmp_path / model_type)
    vocabulary = AutoConfig.from_pretrained(checkpoint).vocab_size
    prompts = [[draw.randrange(vocabulary) for _ in range(length)] for length in LENGTHS]
    reference = expected(checkpoint, prompts)
    for mode in ("hf",) if model_type in NEEDS_A_GRAPH else ("transformers", "hf"):
        llm = load(checkpoint, mode)
        outputs = llm.generate(
            prompts, SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        )
        for prompt, output, (tokens, logits) in zip(prompts, outputs, reference, strict=True):
            assert output.token_ids == tokens, mode
            assert rmse_ratio(llm.logits([*prompt, *tokens]), logits) <= 1e-5, mode


def test_layers_of_several_kinds_have_caches_of_their_own_shape(tmp_path: Path) -> None:
    llm = load(checkpoint_of("gemma4_text", tmp_path / "gemma4_text"), "transformers")
    resources = llm.engine.cache.resources.values()
    assert len({(each.head_dim, each.sliding_window) for each in resources}) == 2


@pytest.mark.parametrize("mode", ["transformers", "hf"])
@pytest.mark.parametrize(
    ("model_type", "config", "problem"),
    [
        # Short convolutions between attention layers
        (
            "lfm2",
            {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
            "with caches the logits are others|aten.conv1d have no cached form",
        ),
        # Its own positions begin after the padding token's
        (
            "camembert",
            {},
            "with caches the logits are others",
        ),
        ("mpt", {}, "attention|another path"),  # written-out attention with ALiBi
        ("mamba", {}, "attention|cannot be exported"),  # none at all
    ],
)
def test_what_only_attention_caches_would_get_wrong_is_refused(
    model_type: str, config: dict[str, Any], problem: str, mode: Mode, tmp_path: Path
) -> None:
    hf_config = AutoConfig.for_model(model_type, **config)
    if hasattr(hf_config, "is_decoder"):
        hf_config.is_decoder = True
    build_tiny(hf_config).save_pretrained(tmp_path / "model")
    with pytest.raises(OnboardError, match=problem) as caught:
        load(tmp_path / "model", mode)
    assert "\n" not in str(caught.value)


def test_positions_that_a_model_counts_itself_are_refused_without_a_graph(tmp_path: Path) -> None:
    with pytest.raises(OnboardError, match="with caches the logits are others"):
        load(checkpoint_of("bart", tmp_path / "bart"), "transformers")


def test_it_says_what_was_lost(tmp_path: Path) -> None:
    checkpoint = checkpoint_of("qwen3_moe", tmp_path / "qwen3_moe")
    facts = load(checkpoint, "hf").engine.facts
    layers = AutoConfig.from_pretrained(checkpoint).num_hidden_layers
    assert any(f"{layers} attention calls are cached" in fact for fact in facts)
    assert any(
        f"{2 * layers} products of experts are transformers' grouped ones" in fact for fact in facts
    )
    assert not any("norms were not matched" in fact for fact in facts)
    off = {"match_rmsnorm_pattern": {"enabled": False}}
    facts = load(checkpoint, "hf", transforms=off).engine.facts
    assert any(f"{4 * layers + 1} norms were not matched" in fact for fact in facts)
    facts = load(checkpoint, "transformers").engine.facts
    assert any(f"{layers} attention calls are cached" in fact for fact in facts)
    assert any("nothing is matched, fused, compiled or captured" in fact for fact in facts)


@pytest.mark.parametrize("mode", ["transformers", "hf"])
def test_a_checkpoint_that_does_not_fill_the_model_is_refused(mode: Mode, tmp_path: Path) -> None:
    checkpoint = checkpoint_of("llama", tmp_path / "llama")
    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        OnboardError, match=r"the checkpoint has no model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        load(checkpoint, mode)


def test_a_count_that_matters_only_far_into_a_text_is_found(tmp_path: Path) -> None:
    """Llama 4 makes queries larger every 8192 tokens, by positions that it counts."""
    layers = {"no_rope_layers": [1, 0], "layer_types": ["full_attention"] * 2}
    config = AutoConfig.for_model("llama4_text", num_hidden_layers=2, moe_layers=[], **layers)
    build_tiny(config).save_pretrained(tmp_path / "model")
    with pytest.raises(OnboardError, match="counts positions itself in some of its code"):
        load(tmp_path / "model", "transformers")
    build_tiny(
        type(config).from_dict({**config.to_dict(), "attn_temperature_tuning": False})
    ).save_pretrained(tmp_path / "model")
    load(tmp_path / "model", "transformers")


@pytest.mark.parametrize("mode", ["transformers", pytest.param("hf", marks=pytest.mark.exhaustive)])
def test_verify_knows_the_modes(mode: Mode, tmp_path: Path) -> None:
    checkpoint = checkpoint_of("gemma2", tmp_path / "gemma2")
    report = verify_model(checkpoint, root=tmp_path, device="cpu", mode=mode)
    assert report.passed, report.first_failure
    assert {"prefill", "chunked prefill", "decode", "batched decode"} == set(
        report.checks[-1].errors
    )


def test_the_command_line_runs_a_model_that_was_not_onboarded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = checkpoint_of("llama", tmp_path / "llama")
    [(tokens, _)] = expected(checkpoint, [[5, 6, 7]])
    words = [
        "run",
        str(checkpoint),
        "--device",
        "cpu",
        "--token-ids",
        "5,6,7",
        "--max-tokens",
        "4",
        "--ignore-eos",
    ]
    assert main.run([*words, "--mode", "transformers", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["outputs"][0]["outputs"][0]["token_ids"] == tokens[:4]
    assert any("mode transformers" in fact for fact in document["facts"])


def test_the_result_of_a_run_says_it_too(tmp_path: Path) -> None:
    checkpoint = checkpoint_of("gpt_neox", tmp_path / "gpt_neox")
    config = RuntimeConfig(model=str(checkpoint), mode="transformers", max_seq_len=64)
    result = run_agent.run(config, tmp_path, device="cpu")
    assert result["status"] == "success", result["error"]
    assert result["settings"]["mode"] == "transformers"
    assert any("2 attention calls are cached" in fact for fact in result["facts"])
