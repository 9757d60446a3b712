"""gather refuses a config with which transformers' own model fails, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from onboard.errors import OnboardError
from onboard.workflow.checkpoint.own_sizes import check_own_sizes
from onboard.workflow.checkpoint.parameter_count import build_on_meta

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
