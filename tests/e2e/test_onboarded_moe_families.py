"""Mixtures of experts: onboarded with one command from a random checkpoint, then equal to
transformers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from onboard.analysis.tiny.tiny_model import build_tiny
from onboard.graph.weight_load.safetensors_folder import Checkpoint
from tests.e2e.test_onboarded_families import _assert_equal, _onboard
from tests.support.checkpoints import save_tokenizer
from tests.support.moe_families import config_dict
from tests.support.warm import Warm


@pytest.mark.parametrize(
    ("family", "variant", "weight"),
    [
        ("mixtral", "8x7b", "model.layers.0.block_sparse_moe.experts.2.w1.weight"),
        pytest.param(
            "qwen3_moe",
            "30b",
            "model.layers.1.mlp.experts.2.gate_proj.weight",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_onboarded_with_one_command_and_equal_to_transformers(
    family: str, variant: str, weight: str, warm: Warm, tmp_path: Path
) -> None:
    fields = config_dict(family, variant)
    checkpoint = tmp_path / family
    build_tiny(AutoConfig.for_model(fields.pop("model_type"), **fields)).save_pretrained(checkpoint)
    save_tokenizer(checkpoint)
    assert weight in Checkpoint(checkpoint).names()
    _onboard(warm, checkpoint, tmp_path / "root")
    _assert_equal(checkpoint, tmp_path / "root", label=f"{family}/{variant}")
