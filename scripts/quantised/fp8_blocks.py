"""Checkpoints of transformers' `fp8` method (DeepSeek, Qwen, Mistral releases), by hand: its own
quantiser needs a GPU.

The weight is float8_e4m3fn [N, K]; `weight_scale_inv` has a scale for each tile, which is multiplied
by. Tiles at the edge may be smaller.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from scripts.quantised.models import save_model
from scripts.quantised.record import fresh, load, logits, record

LARGEST = 448.0


@dataclass(frozen=True)
class Fp8:
    """A way in which the method is used."""

    block: tuple[int, int] | None = (128, 128)
    """None: one scale for a tensor."""
    static: bool = False
    """The activations' scales are in the checkpoint."""
    scale_fmt: str | None = None
    scale_dtype: torch.dtype = torch.float32
    method: str = "fp8"

    def scales(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the scales [row tiles, column tiles] of a weight."""
        rows, columns = self.block or weight.shape
        tiles = [
            torch.stack([tile.abs().amax() for tile in torch.split(band, columns, 1)])
            for band in torch.split(weight.float(), rows, 0)
        ]
        scale = torch.stack(tiles) / LARGEST
        return torch.exp2(scale.log2().ceil()) if self.scale_fmt == "ue8m0" else scale

    def spread(self, scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return each element's scale [N, K]."""
        rows, columns = self.block or shape
        wide = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return wide[: shape[0], : shape[1]]

    def config(self, ignored: tuple[str, ...]) -> dict[str, Any]:
        """Return `quantization_config`."""
        return {
            "quant_method": self.method,
            "fmt": "e4m3",
            "activation_scheme": "static" if self.static else "dynamic",
            "weight_block_size": list(self.block) if self.block else None,
            "modules_to_not_convert": list(ignored),
            **({"scale_fmt": self.scale_fmt} if self.scale_fmt else {}),
        }

    def activation(self, x: torch.Tensor, static: torch.Tensor | None) -> torch.Tensor:
        """Return [..., K] as the scheme's eight bits stand for it: by the width of a
        block, or by the
        tensor's scale.
        """
        if static is not None:
            return _rounded(x, static)
        groups = torch.split(x.float(), self.block[1] if self.block else x.shape[-1], -1)
        scales = [group.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST for group in groups]
        if self.scale_fmt == "ue8m0":
            scales = [torch.exp2(scale.log2().ceil()) for scale in scales]
        return torch.cat(
            [_rounded(group, scale) for group, scale in zip(groups, scales, strict=True)], -1
        )


def _rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    codes = (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes.float() * scale


def write(
    folder: Path, shape: str, fp8: Fp8, ignored: tuple[str, ...] = ("lm_head",), **changes: Any
) -> None:
    """Write a random model of a shape in FP8; modules named by `ignored` stay as they are."""
    with TemporaryDirectory() as temporary:
        source = save_model(Path(temporary), shape, **changes)
        stored = load_file(source / "model.safetensors")
        chosen = {name: stored[name] for name in stored if _is_linear(name, stored[name], ignored)}
        inputs = _largest_inputs(source) if fp8.static else {}
        config = json.loads((source / "config.json").read_text())
    weights, static = {}, {}
    for name, weight in chosen.items():
        scale = fp8.scales(weight)
        wide = fp8.spread(scale, weight.shape)
        codes = (weight.float() / wide).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        weights[name] = codes.float() * wide
        stored[name] = codes
        kept = scale if fp8.block else scale.reshape(())
        stored[f"{name}_scale_inv"] = _stored(kept, fp8.scale_dtype)
        if fp8.static:
            module = name.removesuffix(".weight")
            static[module] = stored[f"{module}.activation_scale"] = inputs[module] / LARGEST
    config["quantization_config"] = fp8.config(ignored)
    (fresh(folder) / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    plain = {name.removesuffix(".weight") for name in weights}

    def activation(name: str, x: torch.Tensor) -> torch.Tensor:
        return fp8.activation(x, static.get(name)) if name in plain else x

    record(folder, weights, activation=activation)


def _stored(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return powers of two as bytes of their exponents for uint8."""
    if dtype == torch.uint8:
        return (scale.log2() + 127).to(torch.uint8)
    return scale.to(dtype)


def _is_linear(name: str, tensor: torch.Tensor, ignored: tuple[str, ...]) -> bool:
    kept = ("embed_tokens", "mlp.gate.weight", *ignored)
    return tensor.ndim == 2 and name.endswith(".weight") and not any(key in name for key in kept)


def _largest_inputs(source: Path) -> dict[str, torch.Tensor]:
    """Return the largest input of each linear by the module's name."""
    found: dict[str, torch.Tensor] = {}
    model = load(source)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, args, name=name: found.update({name: args[0].abs().amax()})
            )
    logits(model)
    return found
