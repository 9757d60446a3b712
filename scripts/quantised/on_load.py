"""Checkpoints that transformers itself writes with bitsandbytes and torchao, which quantise while a
model is loaded.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from scripts.quantised.models import SMALL, save_model
from scripts.quantised.record import Activation, Weights, fresh, record

Tensors = dict[str, torch.Tensor]


def write_bitsandbytes(folder: Path, **settings: Any) -> None:
    """Write a random llama with those arguments of `BitsAndBytesConfig`."""
    _write(folder, BitsAndBytesConfig(**settings))
    stored = load_file(folder / "model.safetensors")
    if settings.get("load_in_4bit"):
        record(folder, _four_bits(stored))
    else:
        record(folder, _eight_bits(stored), activation=_rows(stored))


def write_torchao(folder: Path, scheme: str) -> None:
    """Write a random llama with a config class of `torchao.quantization`."""
    import torchao.quantization as torchao

    _write(folder, TorchAoConfig(getattr(torchao, scheme)(version=2)))
    record(folder, _tensors(folder / "model.safetensors"))


def _write(folder: Path, scheme: Any) -> None:
    with TemporaryDirectory() as temporary:
        source, written = (
            save_model(Path(temporary) / "source", **SMALL),
            Path(temporary) / "written",
        )
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.bfloat16, device_map="cpu", quantization_config=scheme
        )
        model.save_pretrained(written)
        fresh(folder)
        for name in ("config.json", "model.safetensors"):
            shutil.copy(written / name, folder / name)


def _four_bits(stored: Tensors) -> Weights:
    """Return the weights of blocks of 64 numbers, from bytes [N * K / 2, 1].

    The library's kernel for the CPU is wrong where K is no multiple of 64, as blocks run on from one
    row to the next; it is asked for one long row.
    """
    from bitsandbytes.functional import QuantState, dequantize_4bit

    found = {}
    for name in [name for name in stored if f"{name}.absmax" in stored]:
        parts = {key: stored[key] for key in stored if key.startswith(f"{name}.")}
        state = QuantState.from_dict(parts, device=torch.device("cpu"))
        shape, state.dtype = state.shape, torch.float32
        state.shape = torch.Size((1, shape.numel()))
        found[name] = dequantize_4bit(stored[name], state).reshape(shape).contiguous()
    return found


def _eight_bits(stored: Tensors) -> Weights:
    """Return the weights of int8 [N, K] with the largest value of each output, `SCB`."""
    from bitsandbytes.functional import int8_vectorwise_dequant

    return {
        name.replace("SCB", "weight"): int8_vectorwise_dequant(
            stored[name.replace("SCB", "weight")], stored[name]
        ).float()
        for name in stored
        if name.endswith(".SCB")
    }


def _rows(stored: Tensors) -> Activation:
    """Return how LLM.int8 quantises inputs: as float16, each token by its largest value below 6, /
    127; channels in which some token has 6 or more stay as they are.
    """

    def activation(module: str, x: torch.Tensor) -> torch.Tensor:
        if f"{module}.SCB" not in stored:
            return x
        half = x.half().float()
        large = half.abs() >= 6
        scale = half.masked_fill(large, 0).abs().amax(-1, keepdim=True) / 127
        return torch.where(large.flatten(0, -2).any(0), half, (half / scale).round() * scale)

    return activation


def _tensors(path: Path) -> Weights:
    """Return what torchao's tensor classes take the weights for; the file's header names them."""
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    with safe_open(path, framework="pt") as file:
        tensors, _ = unflatten_tensor_state_dict(load_file(path), dict(file.metadata()))
    return {
        name: tensor.dequantize(torch.float32)
        for name, tensor in tensors.items()
        if hasattr(tensor, "qdata")
    }
