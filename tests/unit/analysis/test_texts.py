"""Models that read no texts of one token a position: each is refused for the reason that it has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from onboard.analysis.analyze import analyze
from onboard.analysis.behaviour.texts import check_rows, rows_of_a_text
from onboard.analysis.tiny.loaded_config import load_config
from onboard.analysis.tiny.tiny_config import tiny_config
from onboard.analysis.tiny.tiny_model import build_small, build_tiny
from onboard.errors import OnboardError
from onboard.hf.architecture import causal_lm_class
from onboard.workflow.checkpoint.parameter_count import build_on_meta
from onboard.workflow.phases.gather import require_causal_lm
from onboard.workflow.sweep.inputs.targets import Target
from onboard.workflow.sweep.inputs.tiny_checkpoint import make_checkpoint
from tests.support.families import config_dict

REASONS = {
    "gemma4_assistant": "ignores input_ids and asks for inputs_embeds and shared_kv_states",
    "gemma4_unified_assistant": "ignores input_ids and asks for inputs_embeds and shared_kv_states",
    "blt": r"cross_attn_layers.0 attends from \d+ states to 21",
}


@pytest.mark.parametrize("name", REASONS)
def test_the_saved_checkpoint_is_refused_for_the_true_reason(name: str, tmp_path: Path) -> None:
    made = make_checkpoint(Target(name=name), tmp_path)
    assert made.is_causal is not False
    config = json.loads((tmp_path / "config.json").read_text())
    require_causal_lm(config)
    with pytest.raises(OnboardError, match=REASONS[name]):
        _gather_and_analyze(config, tmp_path)


def _gather_and_analyze(config: dict[str, Any], folder: Path) -> None:
    build_on_meta(folder)
    analyze(config, folder, model="x")


def test_a_text_of_several_codebooks_has_options_to_try(tmp_path: Path) -> None:
    made = make_checkpoint(Target(name="musicgen", variant="varied"), tmp_path)
    assert (made.architecture, made.is_causal) == ("MusicgenForCausalLM", True)
    assert "num_codebooks=3" in made.options


@pytest.mark.parametrize("codebooks", [1, 2, 3])
def test_the_rows_of_a_text_are_counted(codebooks: int) -> None:
    """Those of transformers' model as it is, of which no embedding table and head for each codebook
    tells.
    """
    config = tiny_config(AutoConfig.for_model("musicgen_decoder", num_codebooks=codebooks))
    model = causal_lm_class(config)._from_config(config).eval()
    assert rows_of_a_text(model) == codebooks
    assert rows_of_a_text(build_small(config)) == 1
    if codebooks > 1:
        with pytest.raises(OnboardError, match=f"reads {codebooks} rows of input_ids as one text"):
            check_rows(model)


def test_a_row_of_a_language_model_is_a_text() -> None:
    assert rows_of_a_text(build_tiny(load_config(config_dict("llama")))) == 1


@pytest.mark.parametrize("changes", [{}, {"block_size": 16, "num_random_blocks": 2}])
def test_random_blocks_of_attention_are_not_causal(changes: dict[str, Any]) -> None:
    config = {
        "model_type": "big_bird",
        "is_decoder": True,
        "attention_type": "block_sparse",
        **changes,
    }
    with pytest.raises(
        OnboardError, match="is not causal: a token changes the logits of tokens before it"
    ):
        analyze(config, model="x")


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": float("nan")},
        {"rope_parameters": {"rope_type": "default", "rope_theta": -5.0}},
    ],
)
def test_numbers_that_transformers_makes_no_number_of_are_the_configs(
    changes: dict[str, Any],
) -> None:
    with pytest.raises(OnboardError, match="own LlamaForCausalLM are not finite") as error:
        analyze(config_dict("llama") | changes, model="x")
    assert "config.json" in error.value.hint
