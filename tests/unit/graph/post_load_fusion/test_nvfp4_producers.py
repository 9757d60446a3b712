"""Norms and activations that write four-bit floats (NVFP4) for the linear layers behind them."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from onboard import LLM
from onboard.graph.weight_load.quantised_folder import decoded_state
from onboard.hf.hf_model import load_reference
from onboard.ops.codes.nvfp4_codes import dequantise_nvfp4, quantise_nvfp4
from tests.support import quantised
from tests.support.checkpoints import save_checkpoint

LINEARS, NORM, RELU2 = (
    "quantize_nvfp4_linear_from_config",
    "fuse_rmsnorm_quant_nvfp4",
    "fuse_relu2_quant_nvfp4",
)
LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
SAME = 1e-5


def nearest(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x [..., size] in groups of 16, each a float8 times `scale` times the nearest float of four
    bits, that with an even code where two are as near.
    """
    groups = x.float().unflatten(-1, (-1, 16))
    step = (groups.abs().amax(-1, keepdim=True) / 6 / scale).clamp(max=448)
    step = step.to(torch.float8_e4m3fn).float() * scale
    size = (groups.abs() / step.clamp(min=1e-30)).double()
    away = (size.unsqueeze(-1) - LEVELS).abs() + torch.tensor([0, 1e-9] * 4)
    level = LEVELS[away.argmin(-1)].float()
    return (level * groups.sign() * step).flatten(-2)


def test_codes_are_the_nearest() -> None:
    torch.manual_seed(seed := random.randrange(2**31))
    print(f"seed {seed}")
    x = torch.randn(3, 5, 64) * torch.rand(3, 5, 1) * 4
    x[0, 0, :16] = 0
    x[1, 1, :16] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 2) / 8  # ties
    scale = torch.tensor([2.0**-9])
    codes, scales = quantise_nvfp4(x, scale)
    assert (codes.shape, scales.shape) == ((3, 5, 32), (3, 5, 4))
    assert torch.equal(dequantise_nvfp4(codes, scales, scale), nearest(x, float(scale)))


def of_transformers(folder: Path, ids: list[int], *endings: str) -> torch.Tensor:
    """The logits of transformers' model, the inputs of layers with these endings quantised."""
    config = AutoConfig.from_pretrained(folder)
    dtype, state = torch.float32, decoded_state(folder)
    model = load_reference(config, folder, state=state, dtype=dtype, attn_implementation="eager")
    for name, scale in load_file(folder / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        if kind in ("input_scale", "input_global_scale") and module.endswith(endings):
            number = float(scale) if kind == "input_scale" else 1 / float(scale)
            hook = partial(_quantised, number)
            model.get_submodule(module).register_forward_pre_hook(hook)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def _quantised(scale: float, _: object, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    return nearest(inputs[0], scale)


def run(folder: Path, ids: list[int], key: str) -> tuple[torch.Tensor, int]:
    transforms: dict[str, Any] = {LINEARS: {"backend": "torch"}, key: {"enabled": True}}
    config = {"max_seq_len": 64, "transforms": transforms}
    llm = LLM(str(folder), device="cpu", dtype="float32", config=config)
    [entry] = [entry for entry in llm.engine.history if entry.key == key]
    return llm.logits(ids), entry.num_matches


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("variant", ["modelopt_nvfp4", "ct_nvfp4"])
def test_norms_write_what_the_writer_quantises(variant: str) -> None:
    folder = quantised.FOLDER / variant
    written = load_file(folder / "expected.safetensors")
    ids = written["ids"].tolist()
    assert error(of_transformers(folder, ids, ""), written["activation_logits"]) < SAME
    expected = of_transformers(folder, ids, "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    found, matches = run(folder, ids, NORM)
    assert matches == 2
    assert error(found, expected) < SAME
    assert error(expected, written["logits"]) > 1e-2


def test_squared_relu_writes_codes(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "nemotron", intermediate_size=128, hidden_act="relu2")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("down_proj.weight")]:
        whole = tensors[name].abs().max().reshape(1) / 6 / 448
        codes, scale = quantise_nvfp4(tensors.pop(name), whole)
        tensors |= {name: codes, f"{name}_scale": scale, f"{name}_scale_2": whole[0]}
        tensors[name.replace(".weight", ".input_scale")] = torch.tensor(0.002)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    said = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    found, matches = run(tmp_path, ids, RELU2)
    assert matches == config["num_hidden_layers"]
    assert error(found, of_transformers(tmp_path, ids, "down_proj")) < SAME
