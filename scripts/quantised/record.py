"""What a written checkpoint stands for: the products of its weights and the logits of its model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.quantised import probe

IDS = (1, 17, 5, 42, 9, 33, 28, 60, 11, 3, 50, 22)
"""The tokens of the logits."""
Weights = Mapping[str, torch.Tensor]
"""Dequantised weights by their names in the unquantised checkpoint, [..., outputs, inputs]."""
Activation = Callable[[str, torch.Tensor], torch.Tensor]
"""A linear's name and its input -> the input as its quantised form stands for it."""


def record(
    folder: Path,
    weights: Weights,
    *,
    transposed: bool = False,
    activation: Activation | None = None,
    activation_logits: torch.Tensor | None = None,
) -> None:
    """Write expected.safetensors beside the checkpoint in `folder`.

    `weights` are float32; with `transposed`, stacks of experts are [..., inputs, outputs] in the
    model.
    """
    found = {
        name.removesuffix(".weight"): (weight.double() @ probe(weight.shape[-1])).float()
        for name, weight in weights.items()
    }
    with TemporaryDirectory() as temporary:
        plain = unquantised(folder, Path(temporary), weights, transposed=transposed)
        found["logits"] = logits(load(plain))
        if activation is not None:
            activation_logits = logits(quantising(load(plain), activation))
    if activation_logits is not None:
        found["activation_logits"] = activation_logits.float()
    found["ids"] = torch.tensor(IDS)
    save_file({name: value.contiguous() for name, value in found.items()}, _expected(folder))


def _expected(folder: Path) -> Path:
    return folder / "expected.safetensors"


def unquantised(folder: Path, target: Path, weights: Weights, *, transposed: bool) -> Path:
    """Write the checkpoint that the quantised one stands for, in float32."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    stems = tuple(f"{name.removesuffix('.weight')}{end}" for name in weights for end in "._")
    tensors = {
        name: value.float()
        for name, value in load_file(folder / "model.safetensors").items()
        if name.endswith((".bias", "_bias"))
        or not (name.startswith(stems) or name.endswith(("k_scale", "v_scale")))
    }
    for name, weight in weights.items():
        turned = transposed and weight.ndim == 3
        tensors[name] = (weight.transpose(-1, -2) if turned else weight).contiguous()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def load(folder: Path) -> torch.nn.Module:
    """Return transformers' model of a folder in float32; every weight has to come from there."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {key: value for key, value in report.items() if value}
    tied = set(model.config.tie_word_embeddings * ["lm_head.weight"])
    if set(wrong.pop("missing_keys", ())) - tied or wrong:
        raise ValueError(f"{folder}: {report}")
    return model.eval()  # type: ignore[no-any-return]


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    """Return the model's logits [tokens, vocabulary] of `IDS`."""
    return model(torch.tensor([IDS])).logits[0].float()  # type: ignore[no-any-return]


def quantising(model: torch.nn.Module, activation: Activation) -> torch.nn.Module:
    """Let every linear see its input through `activation`."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, args, name=name: (activation(name, args[0]), *args[1:])
            )
    return model


def fresh(folder: Path) -> Path:
    """Return an empty folder of that path."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
