"""Linears compute with a checkpoint's codes, inputs quantised as its scheme says."""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from onboard import LLM
from onboard.errors import OnboardError, UsageError
from onboard.graph.weight_load.quantised_folder import decoded_state
from onboard.hf.hf_model import load_reference
from onboard.quantised.encoded import encode_fp8
from tests.support import quantised
from tests.support.checkpoints import save_checkpoint

KEYS = ("quantize_fp8_linear_from_config", "quantize_finegrained_fp8_linear_from_config")
SAME = 1e-5


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def logits(folder: Path, ids: list[int], backend: str, **settings: object) -> torch.Tensor:
    transforms = {key: {"backend": backend} for key in KEYS}
    config = {"max_seq_len": 64, "transforms": transforms, **settings}
    return LLM(str(folder), device="cpu", dtype="float32", config=config).logits(ids)


WRITTEN = ["ct_fp8_dynamic", "ct_fp8_block", "hf_fp8_llama"]
STATIC = ["ct_fp8_static", "hf_fp8_static", "modelopt_fp8"]


@pytest.mark.parametrize("variant", WRITTEN + STATIC)
def test_inputs_are_quantised_as_their_writer_does(variant: str) -> None:
    folder = quantised.FOLDER / variant
    expected = load_file(folder / "expected.safetensors")
    ids = expected["ids"].tolist()
    assert error(logits(folder, ids, "torch"), expected["activation_logits"]) < SAME
    assert error(logits(folder, ids, "auto"), expected["logits"]) < SAME  # decoded


def with_input_scales(folder: Path, factors: dict[str, float]) -> Path:
    """A checkpoint with static input scales, some of them multiplied."""
    shutil.copytree(quantised.FOLDER / "ct_fp8_static", folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(".input_scale"):
            tensor.mul_(factors.get(name.split(".")[-2], 1.0))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def of_transformers(folder: Path, ids: list[int]) -> torch.Tensor:
    """The logits of transformers' model, each layer's input divided by its own scale."""
    config = AutoConfig.from_pretrained(folder)
    dtype, state = torch.float32, decoded_state(folder)
    model = load_reference(config, folder, state=state, dtype=dtype, attn_implementation="eager")
    stored = load_file(folder / "model.safetensors")
    for name, scale in stored.items():
        if name.endswith(".input_scale"):
            module = model.get_submodule(name.removesuffix(".input_scale"))
            module.register_forward_pre_hook(partial(_quantised, scale.float()))
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def _quantised(scale: torch.Tensor, _: object, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    codes = (inputs[0] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.float() * scale


@pytest.mark.parametrize("together", [False, True])
def test_joined_layers_with_different_input_scales(together: bool, tmp_path: Path) -> None:
    factors = {"q_proj": 0.5, "v_proj": 4.0, "up_proj": 2.0}
    ids = load_file(quantised.FOLDER / "ct_fp8_static" / "expected.safetensors")["ids"].tolist()
    own = with_input_scales(tmp_path / "own", factors)
    largest = dict.fromkeys(("q_proj", "k_proj", "v_proj"), 4.0) | {
        "gate_proj": 2.0,
        "up_proj": 2.0,
    }
    shared = with_input_scales(tmp_path / "shared", largest)
    keys = {key: {"backend": "torch", "allow_different_input_scales": together} for key in KEYS}
    config = {"max_seq_len": 64, "transforms": keys}
    llm = LLM(str(own), device="cpu", dtype="float32", config=config)
    found = llm.logits(ids)
    apart, as_one = of_transformers(own, ids), of_transformers(shared, ids)
    assert error(apart, as_one) > 1e-3
    assert error(found, as_one if together else apart) < SAME
    what = "share the largest" if together else "are computed one by one"
    fact = f"4 groups of joined layers have different input scales and {what}"
    assert fact in llm.engine.facts


@pytest.mark.parametrize("factor", [0.0, float("nan"), -1.0])
def test_what_is_no_scale_is_refused(factor: float, tmp_path: Path) -> None:
    folder = with_input_scales(tmp_path / "own", {"down_proj": factor})
    with pytest.raises(OnboardError, match=r"down_proj\.input_scale is .*, no scale"):
        logits(folder, [1, 2], "torch")


@pytest.mark.parametrize("kind", ["fp8", "fp8-block"])
def test_weights_are_quantised_as_they_are_loaded(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    save_checkpoint(tmp_path, "llama", **sizes)
    ids, block = [3, 1, 4, 1, 5, 9], (128, 128) if kind == "fp8-block" else None
    found = logits(tmp_path, ids, "auto", quantize=kind)
    exact = logits(tmp_path, ids, "torch")
    assert 1e-3 < error(found, exact) < 0.3
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name] = encode_fp8(tensors[name], block).values()
    save_file(tensors, path, {"format": "pt"})
    weight_only = logits(tmp_path, ids, "torch")
    assert error(found, weight_only) < error(found, exact)


def test_what_is_quantised_depends_on_the_batch() -> None:
    with pytest.raises(UsageError, match="batch_invariant"):
        logits(quantised.FOLDER / "awq", [1, 2], "auto", quantize="fp8", batch_invariant=True)


def test_a_quantised_checkpoint_is_not_quantised_again() -> None:
    with pytest.raises(UsageError, match="quantised already"):
        logits(quantised.FOLDER / "ct_fp8_dynamic", [1, 2], "torch", quantize="fp8")


@pytest.mark.parametrize("block", [None, (128, 128)])
def test_encoding_ends_within_half_a_step(block: tuple[int, int] | None) -> None:
    torch.manual_seed(seed := random.randrange(2**31))
    print(f"seed {seed}")
    weight = torch.randn(200, 300) * torch.rand(200, 1)
    weight[3] = 0
    encoded = encode_fp8(weight, block)
    spread = encoded.scale
    for dim, (size, length) in enumerate(
        zip((encoded.rows, encoded.columns), weight.shape, strict=True)
    ):
        spread = spread.repeat_interleave(size, dim).narrow(dim, 0, length)
    step = torch.maximum(weight.abs() / 8, spread * 2**-9) / 2
    assert bool(((encoded.values() - weight).abs() <= step * 1.001).all())
