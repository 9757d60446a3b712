"""What is before linear layers with quantised inputs quantises these for them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from onboard import LLM
from tests.support import quantised
from tests.support.checkpoints import save_checkpoint

LINEARS = ("quantize_fp8_linear_from_config", "quantize_finegrained_fp8_linear_from_config")
NORM, GATE, ATTENTION = "fuse_rmsnorm_quant_fp8", "fuse_silu_mul", "fuse_trtllm_attn_quant_fp8"
PRODUCERS: dict[str, dict[str, Any]] = {
    NORM: {"enabled": True},
    GATE: {"backend": "trtllm"},
    ATTENTION: {"enabled": True},
}
SAME = 1e-5


def opened(folder: Path, *keys: str, joined: bool = True) -> LLM:
    transforms: dict[str, dict[str, Any]] = {key: {"backend": "torch"} for key in LINEARS}
    transforms |= {key: PRODUCERS[key] for key in keys}
    transforms["fuse_gemms"] = {"enabled": joined}
    config = {"max_seq_len": 64, "transforms": transforms}
    return LLM(str(folder), device="cpu", dtype="float32", config=config)


MATCHES = {
    "ct_fp8_static": {NORM: 4, GATE: 2, ATTENTION: 2},
    "ct_fp8_dynamic": {NORM: 4, GATE: 2, ATTENTION: 0},
    "ct_fp8_block": {NORM: 2, GATE: 1, ATTENTION: 0},
}


@pytest.mark.parametrize("variant", MATCHES)
def test_logits_stay_the_writers(variant: str) -> None:
    expected = load_file(quantised.FOLDER / variant / "expected.safetensors")
    llm = opened(quantised.FOLDER / variant, *PRODUCERS)
    found = llm.logits(expected["ids"].tolist())
    wanted = expected["activation_logits"]
    assert (found - wanted).norm() / wanted.norm() < SAME
    matches = {entry.key: entry.num_matches for entry in llm.engine.history}
    assert {key: matches[key] for key in PRODUCERS} == MATCHES[variant]


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_layers_share_codes_if_their_scales_agree(factor: float, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(quantised.FOLDER / "ct_fp8_static", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.input_scale"] *= factor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    llm = opened(folder, NORM, joined=False)
    [norm] = [entry for entry in llm.engine.history if entry.key == NORM]
    assert norm.num_matches == (2 if factor == 1.0 else 1)
    expected = opened(folder, joined=False).logits(ids)
    assert (llm.logits(ids) - expected).norm() / expected.norm() < 1e-6


SWIGLU = "fuse_finegrained_fp8_swiglu"


def with_block(folder: Path, joined: bool, enabled: bool = True, **settings: Any) -> LLM:
    transforms: dict[str, dict[str, Any]] = {key: {"backend": "torch"} for key in LINEARS}
    transforms |= {key: {"enabled": joined} for key in ("fuse_gemms", "match_swiglu_pattern")}
    transforms[SWIGLU] = {"enabled": enabled}
    config = {"max_seq_len": 64, "transforms": transforms, **settings}
    llm = LLM(str(folder), device="cpu", dtype="float32", config=config)
    [entry] = [entry for entry in llm.engine.history if entry.key == SWIGLU]
    assert entry.ops.get("torch_fused_finegrained_fp8_swiglu_mlp", 0) == entry.num_matches
    assert bool(entry.num_matches) == enabled
    return llm


@pytest.mark.parametrize("joined", [True, False])
def test_a_block_with_eight_bit_weights_becomes_one_op(joined: bool, tmp_path: Path) -> None:
    """Gate and up are joined before, or by it: then they are linear layers of their own."""
    folder = quantised.FOLDER / "ct_fp8_block"
    expected = load_file(folder / "expected.safetensors")
    found = with_block(folder, joined).logits(expected["ids"].tolist())
    wanted = expected["activation_logits"]
    assert (found - wanted).norm() / wanted.norm() < SAME
    save_checkpoint(tmp_path, "llama", hidden_size=256, intermediate_size=256, head_dim=64)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    found, expected = (
        with_block(tmp_path, joined, enabled, quantize="fp8-block").logits(ids)
        for enabled in (True, False)
    )
    assert (found - expected).norm() / expected.norm() < 1e-6


NVFP4_SWIGLU = "fuse_nvfp4_swiglu"


def with_nvfp4_block(folder: Path, joined: bool, enabled: bool) -> LLM:
    transforms: dict[str, dict[str, Any]] = {
        "quantize_nvfp4_linear_from_config": {"backend": "torch"},
        "fuse_gemms": {"enabled": joined},
        "match_swiglu_pattern": {"enabled": joined},
        NVFP4_SWIGLU: {"enabled": enabled},
    }
    config = {"max_seq_len": 64, "transforms": transforms}
    llm = LLM(str(folder), device="cpu", dtype="float32", config=config)
    [entry] = [entry for entry in llm.engine.history if entry.key == NVFP4_SWIGLU]
    assert entry.num_matches == enabled
    assert entry.ops.get("torch_fused_nvfp4_swiglu_mlp", 0) == entry.num_matches
    return llm


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_block_with_nvfp4_weights_becomes_one_op(
    factor: float, joined: bool, tmp_path: Path
) -> None:
    """Gate and up may have different further scales."""
    folder = tmp_path / "model"
    shutil.copytree(quantised.FOLDER / "modelopt_nvfp4", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale_2"] *= factor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    found, expected = (
        with_nvfp4_block(folder, joined, enabled).logits(ids) for enabled in (True, False)
    )
    assert (found - expected).norm() / expected.norm() < 1e-6
