"""Checkpoints of `fp8` whose experts are in MXFP4, two codes in an int8, and whose scales are named for
their layers, as DeepSeek-V4's: written number by number.
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
from onboard.quantised.config_layouts import ConfigLayouts
from onboard.quantised.encoded import E2M1

EXPERT = "layers.0.ffn.experts.1.w2"
SHARED = "layers.0.ffn.shared_experts.w2"
OUTPUTS, INPUTS = 48, 128
SAID = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}


def exponents(*shape: int) -> torch.Tensor:
    return torch.randint(118, 128, shape).to(torch.uint8)


def written(folder: Path, said: dict[str, Any], **beside: Any) -> dict[str, torch.Tensor]:
    """Write an expert's layer and another; return what they stand for, in float64."""
    torch.manual_seed(0)
    codes, scale = torch.randint(0, 16, (OUTPUTS, INPUTS)), exponents(OUTPUTS, INPUTS // 32)
    packed = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8)
    eight, whole = torch.randn(OUTPUTS, INPUTS).to(torch.float8_e4m3fn), exponents(1, 1)
    tensors = {
        f"{EXPERT}.weight": packed,
        f"{EXPERT}.scale": scale.view(torch.float8_e8m0fnu),
        f"{SHARED}.weight": eight,
        f"{SHARED}.scale": whole.view(torch.float8_e8m0fnu),
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"quantization_config": said, **beside}))
    values = torch.tensor(E2M1, dtype=torch.float64)[codes]
    powers = 2.0 ** (scale.double() - 127).repeat_interleave(32, 1)
    return {EXPERT: values * powers, SHARED: eight.double() * 2.0 ** (whole.double() - 127)}


def opened(folder: Path) -> QuantisedCheckpoint:
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, QuantisedCheckpoint)
    return checkpoint


@pytest.mark.parametrize("inside", [False, True])
def test_experts_are_read_as_they_were_written(inside: bool, tmp_path: Path) -> None:
    """The dtype of experts may stand beside what else the config says, or in it."""
    fp4 = {"expert_dtype": "fp4"}
    expected = written(tmp_path, SAID | fp4 if inside else SAID, **({} if inside else fp4))
    checkpoint = opened(tmp_path)
    assert checkpoint.names().keys() == {f"{name}.weight" for name in expected}
    for name, values in expected.items():
        assert torch.equal(checkpoint.read(f"{name}.weight").double(), values)
    kinds = {name: each.computed_as for name, each in checkpoint.weights.items()}
    assert kinds == {f"{EXPERT}.weight": "mxfp4", f"{SHARED}.weight": "fp8"}


def test_a_config_tells_experts_from_other_layers(tmp_path: Path) -> None:
    config = {"quantization_config": SAID, "expert_dtype": "fp4"}
    layouts = ConfigLayouts.of(config, tmp_path)
    assert layouts is not None
    kinds = {name: layouts.layout_of(name) for name in (EXPERT, SHARED)}
    assert {name: each and each.kind for name, each in kinds.items()} == {
        EXPERT: "mxfp4",
        SHARED: "fp8",
    }


def test_integers_that_nothing_explains_are_refused(tmp_path: Path) -> None:
    written(tmp_path, SAID)
    with pytest.raises(OnboardError, match=rf"{EXPERT}\.weight is int8, without its scales"):
        opened(tmp_path).names()


@pytest.mark.parametrize("missing", [f"{EXPERT}.scale", f"{SHARED}.scale"])
def test_a_scale_that_is_missing_is_named(missing: str, tmp_path: Path) -> None:
    written(tmp_path, SAID, expert_dtype="fp4")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(OnboardError, match=missing.removesuffix(".scale")):
        opened(tmp_path).names()


def test_codes_without_half_of_their_scales_are_refused(tmp_path: Path) -> None:
    written(tmp_path, SAID, expert_dtype="fp4")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{EXPERT}.scale"] = tensors[f"{EXPERT}.scale"][:, :2].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(OnboardError, match=r"\[48, 2\], not \[48, 4\]"):
        opened(tmp_path).names()
