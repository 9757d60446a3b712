"""gather refuses a config with which transformers' own model fails, and no other; so does a run of
a model that was not onboarded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from onboard.config import RuntimeConfig
from onboard.errors import OnboardError
from onboard.runtime.build import build_engine
from onboard.workflow.checkpoint.own_sizes import check_own_sizes
from onboard.workflow.checkpoint.parameter_count import build_on_meta
from tests.support.sharding.zoo import ROOT

PHI = {"vocab_size": 60, "hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GPTJ = {"vocab_size": 60, "n_embd": 64, "n_head": 8, "n_layer": 2, "n_positions": 128}


def built(folder: Path, model_type: str, **values: Any) -> Any:
    AutoConfig.for_model(model_type, **values).save_pretrained(folder)
    return build_on_meta(folder)


@pytest.mark.parametrize("rotary_dim", [12, 64])
def test_more_rotary_numbers_than_a_head_has_are_refused(tmp_path: Path, rotary_dim: int) -> None:
    model = built(tmp_path, "gptj", **GPTJ, rotary_dim=rotary_dim)
    with pytest.raises(OnboardError, match="own GPTJForCausalLM fails with this config") as error:
        check_own_sizes(model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model_type", "values", "size"),
    [
        ("gptj", {**GPTJ, "rotary_dim": 64}, 64),  # pairs of neighbours turn
        ("phi", {**PHI, "rope_parameters": {**ROPE, "partial_rotary_factor": 2.0}}, 16),  # halves
    ],
)
def test_a_run_without_onboarding_says_which_sizes(
    model_type: str, values: dict[str, Any], size: int, tmp_path: Path
) -> None:
    AutoConfig.for_model(model_type, **values).save_pretrained(tmp_path)
    with pytest.raises(OnboardError, match=f"turn {size} numbers of a head, and heads have 8"):
        build_engine(tmp_path, RuntimeConfig(device="cpu", skip_loading_weights=True), root=ROOT)


def test_sizes_that_go_together_pass(tmp_path: Path) -> None:
    check_own_sizes(built(tmp_path, "gptj", **GPTJ, rotary_dim=8))


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("bart", {}),  # asks a tensor for its value
        ("xlnet", {}),  # has a table on the CPU
        ("gpt_oss", {"num_hidden_layers": 2}),  # an operator that wants bfloat16
    ],
)
def test_what_only_the_meta_device_cannot_do_is_no_reason(
    tmp_path: Path, model_type: str, values: dict[str, Any]
) -> None:
    check_own_sizes(built(tmp_path, model_type, **values))
