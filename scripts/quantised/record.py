"""What a written checkpoint stands for: the products of its weights and the logits of its model."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
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
CacheScales = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""Scales of keys and values by attention module."""
Activation = Callable[[str, torch.Tensor], torch.Tensor]
"""A linear's name and its input -> the input as its quantised form stands for it."""


def record(
    folder: Path,
    weights: Weights,
    *,
    transposed: bool = False,
    activation: Activation | None = None,
    cache: CacheScales | None = None,
    plain_config: dict[str, Any] | None = None,
    others: Weights | None = None,
) -> None:
    """Write expected.safetensors beside the checkpoint in `folder`.

    `weights` are float32; with `transposed`, stacks of experts are [..., inputs, outputs] in the
    model. `plain_config` and `others` are the config and the tensors that are not quantised, where
    the folder has neither.
    """
    found = {
        name.removesuffix(".weight"): (weight.double() @ probe(weight.shape[-1])).float()
        for name, weight in weights.items()
    }
    with TemporaryDirectory() as temporary:
        config = plain_config or json.loads((folder / "config.json").read_text())
        rest = unquantised(folder, weights) if others is None else others
        turned = {
            name: weight.transpose(-1, -2) if transposed and weight.dim() == 3 else weight
            for name, weight in weights.items()
        }
        plain = write_plain(Path(temporary), config, {**rest, **turned})
        found["logits"] = logits(load(plain))
        if activation is not None:
            found["activation_logits"] = logits(quantising(load(plain), activation))
            if cache:
                with caching(plain_model := quantising(load(plain), activation), cache):
                    found["cache_logits"] = logits(plain_model)
    found["ids"] = torch.tensor(IDS)
    save_file({name: value.contiguous() for name, value in found.items()}, _expected(folder))


def _expected(folder: Path) -> Path:
    return folder / "expected.safetensors"


def unquantised(folder: Path, weights: Weights) -> Weights:
    """Return the tensors of a folder that are no part of `weights`, in float32."""
    stems = tuple(f"{name.removesuffix('.weight')}{end}" for name in weights for end in "._")
    return {
        name: value.float()
        for name, value in load_file(folder / "model.safetensors").items()
        if name.endswith((".bias", "_bias"))
        or not (name.startswith(stems) or name.endswith(("k_scale", "v_scale")))
    }


def write_plain(target: Path, config: dict[str, Any], tensors: Weights) -> Path:
    """Write an unquantised checkpoint in float32."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    (target / "config.json").write_text(json.dumps({**plain, "dtype": "float32"}))
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, target / "model.safetensors", metadata={"format": "pt"})
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
    """Let every linear see its input through `activation`, those of stacked experts too."""
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.forward = partial(_experts, module, name, activation)
        elif isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, args, name=name: (activation(name, args[0]), *args[1:])
            )
    return model


@contextmanager
def caching(model: torch.nn.Module, scales: CacheScales) -> Iterator[None]:
    """Let attention see keys and values as a cache of eight-bit floats holds them."""
    modules = dict(model.named_modules())
    source = sys.modules[type(modules[next(iter(scales))]).__module__]
    names = {module: name for name, module in modules.items()}

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *rest: Any,
        **kw: Any,
    ) -> Any:
        held = [
            (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
            for x, scale in zip((key, value), scales[names[module]], strict=True)
        ]
        return original(module, query, *held, *rest, **kw)

    original = source.eager_attention_forward
    source.eager_attention_forward = attention  # type: ignore[attr-defined]
    try:
        yield
    finally:
        source.eager_attention_forward = original  # type: ignore[attr-defined]


def _experts(
    module: Any,
    name: str,
    activation: Activation,
    x: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
) -> torch.Tensor:
    """Return a mixture [tokens, hidden] of gated experts, one linear after the other."""
    mixed = torch.zeros_like(x)
    for expert, (both, down) in enumerate(zip(module.gate_up_proj, module.down_proj, strict=True)):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        gate, up = (
            activation(f"{name}.{expert}.{part}", x[token].unsqueeze(0)) @ weight.T
            for part, weight in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True)
        )
        inner = activation(f"{name}.{expert}.down_proj", module.act_fn(gate) * up)
        mixed[token] += (inner @ down.T)[0] * shares[token, place].unsqueeze(-1)
    return mixed


def fresh(folder: Path) -> Path:
    """Return an empty folder of that path."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
