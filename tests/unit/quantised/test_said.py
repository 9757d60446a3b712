"""Quantised checkpoints are known by name, and unquantised ones are left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard.errors import OnboardError
from onboard.graph.weight_load.safetensors_folder import TensorMeta
from onboard.quantised.read_method import read_method, refuse_unsaid
from onboard.quantised.said import describe_config, describe_tensors

FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def tensor(dtype: torch.dtype) -> TensorMeta:
    return TensorMeta((4, 4), dtype, 16 * dtype.itemsize)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quantization_config": FP8}, "fp8, 128 x 128 blocks"),
        ({"text_config": {"quantization_config": FP8}}, "fp8, 128 x 128 blocks"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
            "gptq, 4 bits, groups of 128",
        ),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
            "modelopt, NVFP4",
        ),
        ({"quantization": {"group_size": 64, "bits": 4}}, "4 bits, groups of 64"),
        ({"quantization_config": None, "hidden_size": 8}, None),
        ({"quantization_config": {}}, None),
    ],
)
def test_what_a_config_says(config: dict[str, Any], expected: str | None) -> None:
    assert describe_config(config) == expected


@pytest.mark.parametrize(
    ("names", "dtype", "expected"),
    [
        (["a.weight", "a.weight_scale_inv"], torch.float32, "fp8"),
        (["a.gate_up_proj_blocks", "a.gate_up_proj_scales"], torch.uint8, "mxfp4"),
        (["a.qweight", "a.qzeros", "a.scales"], torch.int32, "GPTQ"),
        (["a.weight_packed", "a.weight_scale"], torch.int32, "compressed-tensors"),
        (["a.weight"], torch.float8_e4m3fn, "a.weight is float8_e4m3fn"),
        (["a.weight._data", "a.weight._scale", "a.input_scale"], torch.int8, "optimum-quanto"),
        (["a.W_q", "a.zero", "a.scale"], torch.uint8, "hqq"),
        (["a.W_q", "a.W_k", "b.scale"], torch.float32, None),
        (["vision.transformer_blocks", "a.weight", "a.scales"], torch.float32, None),
    ],
)
def test_what_tensors_say(names: list[str], dtype: torch.dtype, expected: str | None) -> None:
    found = describe_tensors({name: tensor(dtype) for name in names})
    assert (found is None) if expected is None else (found is not None and expected in found)


def test_the_file_of_modelopt_says_it(tmp_path: Path) -> None:
    assert read_method({}, tmp_path) is None
    content = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    method = read_method({}, tmp_path)
    assert method is not None
    assert method.description == "modelopt, FP8"


def test_tensors_that_nothing_speaks_of_are_refused() -> None:
    refuse_unsaid({"a.weight": tensor(torch.bfloat16)})
    with pytest.raises(OnboardError, match="a.weight is float8_e4m3fn"):
        refuse_unsaid({"a.weight": tensor(torch.float8_e4m3fn)})
