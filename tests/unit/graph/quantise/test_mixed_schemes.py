"""A model whose layers each have a scheme of their own, or none: q, k and v, gate and up share inputs
and differ.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from onboard import LLM
from onboard.graph.weight_load.quantised_folder import open_checkpoint
from tests.support.checkpoints import save_checkpoint
from tests.support.quantised_drawing import eight_bits, gptq, packed

KINDS = ("fp8", "finegrained_fp8", "int8", "int4")
SAME, IDS = 1e-5, [3, 1, 4, 1, 5, 9, 2, 6]


def run(folder: Path, backend: str) -> LLM:
    keys = [f"quantize_{kind}_linear_from_config" for kind in KINDS]
    transforms = {key: {"backend": backend} for key in keys}
    config = {"max_seq_len": 64, "transforms": transforms}
    return LLM(str(folder), device="cpu", dtype="float32", config=config)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def quantise(folder: Path, method: str, draw: random.Random) -> dict[str, torch.Tensor]:
    """Replace the weights of a model's linear layers, in place; return what these now are."""
    save_checkpoint(folder, "llama", hidden_size=64, intermediate_size=128, head_dim=32)
    path = folder / "model.safetensors"
    tensors, weights, groups = load_file(path), {}, {}
    names = [name for name in tensors if name.endswith("_proj.weight")]
    for index, name in enumerate(names):
        if index == 1 or draw.random() < 0.1:
            continue  # one is left as it is, at least
        shape = tuple(tensors.pop(name).shape)
        writer = gptq if method == "gptq" else draw.choice([packed, eight_bits])
        layer = writer(draw, shape)
        stem = name.removesuffix(".weight")
        tensors |= {f"{stem}.{ending}": each for ending, each in layer.tensors.items()}
        weights[name] = layer.weight
        groups[stem] = layer.said
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = said(method, groups)
    (folder / "config.json").write_text(json.dumps(config))
    return weights


def said(method: str, layers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the config says of layers: GPTQ's bits by patterns, or groups by names and patterns."""
    if method == "gptq":
        keys = ("bits", "group_size", "desc_act")
        own = {
            f"+:{stem}$".replace(".", r"\."): {key: each[key] for key in keys}
            for stem, each in layers.items()
        }
        return {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": own}
    groups = {}
    for index, (stem, each) in enumerate(layers.items()):
        (scheme,) = each["config_groups"].values()
        target = stem if index % 2 else "re:" + stem.replace(".", r"\.") + "$"
        groups[f"group_{index}"] = {**scheme, "targets": [target], "format": each["format"]}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_each_layer_computes_with_its_own_codes(method: str, tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    weights = quantise(tmp_path, method, random.Random(seed))
    checkpoint = open_checkpoint(tmp_path)
    for name, weight in weights.items():
        assert error(checkpoint.read(name).double(), weight) < SAME, name
    codes, decoded = run(tmp_path, "torch"), run(tmp_path, "auto")
    assert sum(entry.num_matches for entry in codes.engine.history if "quantize_" in entry.key) > 0
    assert error(codes.logits(IDS), decoded.logits(IDS)) < SAME
