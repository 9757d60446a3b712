"""Checkpoints that are quantised but for their weights: inputs of layers, or cached keys and values. They
stand for the weights that they have.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from onboard.errors import OnboardError
from onboard.graph.weight_load.quantised_folder import QuantisedCheckpoint, open_checkpoint
from onboard.workflow.checkpoint.parameter_count import build_on_meta
from onboard.workflow.checkpoint.usable_weights import check_fit, check_weights
from tests.support.checkpoints import save_checkpoint

FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
ATTENTION = "model.layers.0.self_attn"
LINEAR = "model.layers.0.mlp.up_proj"
ONE = torch.ones(1)
ZERO = torch.zeros(1).to(torch.float8_e4m3fn)
CACHE = {f"{ATTENTION}.k_scale": ONE, f"{ATTENTION}.v_scale": ONE}


def compressed(groups: Any, **values: Any) -> dict[str, Any]:
    said = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": groups}
    return said | values


def inputs(target: str) -> dict[str, Any]:
    return {"g": {"targets": [target], "weights": None, "input_activations": FLOAT8}}


CASES = {
    "caches": (compressed({}, kv_cache_scheme=FLOAT8), CACHE),
    "no groups": (compressed(None), {}),
    "attention": (
        compressed(inputs("LlamaAttention"), kv_cache_scheme=FLOAT8),
        {**CACHE, f"{ATTENTION}.q_scale": ONE * 0, f"{ATTENTION}.q_zero_point": ZERO},
    ),
    "inputs": (
        compressed(inputs("Linear")),
        {f"{LINEAR}.input_scale": ONE, f"{LINEAR}.input_zero_point": ZERO},
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
        {f"{ATTENTION}.k_proj.k_scale": ONE, f"{ATTENTION}.v_proj.v_scale": ONE},
    ),
}


def written(folder: Path, said: dict[str, Any], beside: dict[str, torch.Tensor]) -> Path:
    save_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    tensors = load_file(folder / "model.safetensors")
    own = {name: tensor.clone() for name, tensor in (tensors | beside).items()}
    save_file(own, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("case", CASES)
def test_they_are_the_model_that_they_hold(case: str, tmp_path: Path) -> None:
    plain = open_checkpoint(save_checkpoint(tmp_path / "plain"))
    folder = written(tmp_path / "quantised", *CASES[case])
    found = open_checkpoint(folder)
    check_fit(build_on_meta(folder), found.names())
    check_weights(folder)
    assert found.names() == plain.names()
    assert all(torch.equal(found.read(name), plain.read(name)) for name in plain.names())


def test_a_run_says_so(tmp_path: Path) -> None:
    found = open_checkpoint(written(tmp_path, *CASES["inputs"]))
    assert isinstance(found, QuantisedCheckpoint)
    first, second = found.facts()
    assert first == "no weights are quantised (compressed-tensors)"
    assert second.startswith("1 layers with whole weights compute with exact inputs")


@pytest.mark.parametrize("case", CASES)
def test_weights_that_are_quantised_all_the_same_are_refused(case: str, tmp_path: Path) -> None:
    said, beside = CASES[case]
    scale = {f"{LINEAR}.weight_scale": ONE}
    with pytest.raises(OnboardError, match="no group|no weights|quant_algo = NONE"):
        open_checkpoint(written(tmp_path / "scale", said, beside | scale)).names()
    codes = {f"{LINEAR}.weight": torch.ones(48, 32).to(torch.float8_e4m3fn)}
    with pytest.raises(OnboardError, match="lacks a part of a weight"):
        open_checkpoint(written(tmp_path / "codes", said, beside | codes)).names()


def test_a_group_of_weights_needs_some(tmp_path: Path) -> None:
    groups = inputs("LlamaAttention")
    groups["h"] = {"targets": ["Linear"], "weights": FLOAT8}
    said = compressed(groups, format="float-quantized")
    with pytest.raises(OnboardError, match="no tensor is"):
        open_checkpoint(written(tmp_path, said, {})).names()
