"""Experts that lie in a checkpoint as transformers has them in memory, one stack a layer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Concatenate, MergeModulelist

from onboard.graph.weight_load.converted_weights import converted
from onboard.graph.weight_load.quantised_folder import open_checkpoint, quantised_checkpoint
from onboard.graph.weight_load.safetensors_folder import Checkpoint
from onboard.graph.weight_load.weight_sources import read_source
from onboard.hub import LocalSource
from onboard.quantised.encoded import encode_fp8
from onboard.workflow.checkpoint.parameter_count import estimate_size
from tests.support.checkpoints import edit_config, save_checkpoint

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 3, "num_experts_per_tok": 2},
}
SAME = 1e-6


def save_stacks(folder: Path, model_type: str) -> Path:
    """Save a random mixture as `save_original_format=False` does."""
    save_checkpoint(folder / "stacks", model_type, **FAMILIES[model_type])
    model = AutoModelForCausalLM.from_pretrained(folder / "stacks")
    torch.manual_seed(seed := random.randrange(10**6))
    print("seed", seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder / "stacks", save_original_format=False)
    return folder / "stacks"


def error_of(folder: Path, reference: Path) -> float:
    """Return how far the logits of a checkpoint are from transformers' of another."""
    from onboard import LLM

    own = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32).eval()
    prompt = [random.randrange(3, 97) for _ in range(11)]
    found = LLM(folder, device="cpu", dtype="float32").logits(prompt)
    with torch.no_grad():
        expected = own(torch.tensor([prompt])).logits[0]
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_mixture_in_stacks_computes_transformers_logits(model_type: str, tmp_path: Path) -> None:
    folder = save_stacks(tmp_path, model_type)
    stored = load_file(folder / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj") for name in stored), "the case is not made"
    assert error_of(folder, folder) < SAME


def quantise(folder: Path, block: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Quantise the stacks of a checkpoint to float8 in blocks; return all tensors, decoded."""
    stored = load_file(folder / "model.safetensors")
    decoded = dict(stored)
    for name in [name for name in stored if ".experts." in name]:
        stack = [encode_fp8(matrix, block) for matrix in stored[name]]
        decoded[name] = torch.stack([each.values() for each in stack])
        stored[name] = torch.stack([each.codes for each in stack])
        stored[f"{name}_scale_inv"] = torch.stack([each.scale for each in stack])
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    said = {"quant_method": "fp8", "weight_block_size": list(block)}
    edit_config(folder, quantization_config=said)
    return decoded


def test_so_does_one_whose_stacks_are_quantised(tmp_path: Path) -> None:
    folder = save_stacks(tmp_path, "qwen3_moe")
    decoded = quantise(folder, (8, 16))
    save_checkpoint(tmp_path / "float", "qwen3_moe", **FAMILIES["qwen3_moe"])
    save_file(decoded, tmp_path / "float" / "model.safetensors", {"format": "pt"})
    assert error_of(folder, tmp_path / "float") < SAME


def test_quantised_stacks_that_are_taken_apart_are_counted_decoded(tmp_path: Path) -> None:
    """On a GPU, too: a layer of an expert is a part of an entry, and is decoded as it is read."""
    folder = save_stacks(tmp_path, "qwen3_moe")
    decoded = quantise(folder, (128, 128))
    checkpoint = quantised_checkpoint(folder)
    assert checkpoint is not None
    stacks = [name for name in checkpoint.weights if ".experts." in name]
    assert stacks
    assert not checkpoint.kept_bytes().keys() & set(stacks)
    size = estimate_size(LocalSource(str(folder)), "bfloat16", gpu=True)
    assert size.bytes == 2 * sum(each.numel() for each in decoded.values())


def test_no_more_of_a_stack_is_read_than_the_layer(tmp_path: Path) -> None:
    layers = {
        f"m.mlp.experts.{expert}.{layer}.weight": torch.randn(6, 5)
        for expert in range(12)
        for layer in ("gate_proj", "up_proj")
    }
    groups = [
        [value for name, value in layers.items() if f".{layer}." in name]
        for layer in ("gate_proj", "up_proj")
    ]
    sources, target = ["gate", "up"], ["both"]
    merged = MergeModulelist(0).convert(dict(zip(sources, groups, strict=True)), sources, sources)
    whole = Concatenate(1).convert(merged, sources, target)["both"]
    save_file({"m.mlp.experts.gate_up_proj": whole}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    checkpoint = open_checkpoint(tmp_path)
    assert type(checkpoint) is Checkpoint
    found = converted(list(layers), checkpoint.names(), ["qwen3_moe"])
    assert found.keys() == layers.keys()
    for name, source in found.items():
        assert not source.is_plain
        before = checkpoint.bytes_read
        assert torch.equal(read_source(checkpoint, source, "cpu"), layers[name])
        assert checkpoint.bytes_read - before == whole[0].nbytes
        assert torch.equal(source.of([whole]), layers[name])
