"""The tensors of a low-rank adapter, as PEFT saves them: two matrices for each layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from onboard.errors import OnboardError, UsageError
from onboard.graph.lora.adapter_config import AdapterConfig, read_adapter_config
from onboard.graph.weight_load.safetensors_folder import Checkpoint, TensorMeta, find_non_finite

WEIGHTS_FILE = "adapter_model.safetensors"
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Side = str
"""A: from a layer's inputs to the rank; B: from there to its outputs."""


@dataclass(frozen=True)
class Adapter:
    """An adapter whose file is open, and of which no tensor has been read."""

    name: str
    config: AdapterConfig
    weights: Checkpoint
    layers: Mapping[str, Mapping[Side, str]]
    """The path of each layer in the model, with the names of its tensors."""

    def down(self, layer: str, inputs: int) -> Tensor:
        """Return the matrix [rank, inputs] of a layer, float32 on the CPU."""
        return self._read(layer, "A", (self.config.rank_of(layer), inputs))

    def up(self, layer: str, outputs: int) -> Tensor:
        """Return the matrix [outputs, rank] of a layer times its scale, float32 on the CPU."""
        found = self._read(layer, "B", (outputs, self.config.rank_of(layer)))
        return found * self.config.scale_of(layer)

    def _read(self, layer: str, side: Side, shape: tuple[int, int]) -> Tensor:
        tensor = self.layers[layer][side]
        meta = self.weights.names()[tensor]
        if meta.shape != shape:
            raise OnboardError(
                f"the adapter {self.name}: {tensor} has shape {list(meta.shape)}, and the model and"
                f" the rank want {list(shape)}",
                hint="It is an adapter of another model",
            )
        values = self.weights.read(tensor)
        if (found := find_non_finite(values)) is not None:
            raise OnboardError(
                f"the adapter {self.name}: {tensor} has {found}", hint="Train it again"
            )
        return values.float()


def open_adapter(name: str, folder: Path) -> Adapter:
    """Open an adapter in PEFT's format.

    Raises:
        UsageError: there is none.
        OnboardError: its files are damaged, or want what is not computed here.
    """
    if not folder.is_dir():
        raise UsageError(
            f"the adapter {name}: {folder} is no folder", hint="Give it as --lora NAME=FOLDER"
        )
    config = read_adapter_config(folder, name)
    if not (folder / WEIGHTS_FILE).is_file():
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        raise OnboardError(
            f"the adapter {name}: {folder} has no {WEIGHTS_FILE}",
            hint="Pickled weights are not read: save it again with save_pretrained"
            if pickled
            else "Give the folder that PEFT's save_pretrained has written",
        )
    weights = Checkpoint(folder, WEIGHTS_FILE)
    return Adapter(name, config, weights, _layers(weights.names(), config, name))


def _layers(
    tensors: Mapping[str, TensorMeta], config: AdapterConfig, name: str
) -> Mapping[str, Mapping[Side, str]]:
    """Return the layers that tensors are for; raise `OnboardError` for a tensor that is for none."""
    layers: dict[str, dict[Side, str]] = {}
    for tensor, meta in tensors.items():
        found = _NAME.fullmatch(tensor)
        if found is None or meta.dtype not in _DTYPES:
            what = "" if found is None else f" of {str(meta.dtype).removeprefix('torch.')}"
            raise OnboardError(
                f"the adapter {name}: {WEIGHTS_FILE} has {tensor!r:.200}{what}, which is not"
                " computed here",
                hint="Matrices lora_A and lora_B of linear layers are, of 16 or 32 bits",
            )
        if not config.targets_layer(found[1]):
            raise OnboardError(
                f"the adapter {name}: {WEIGHTS_FILE} has {tensor!r:.200}, which target_modules does"
                " not name"
            )
        layers.setdefault(found[1], {})[found[2]] = tensor
    for layer, sides in layers.items():
        if len(sides) < 2:
            raise OnboardError(f"the adapter {name}: {layer!r:.200} has one matrix of two")
    if not layers:
        raise OnboardError(f"the adapter {name}: {WEIGHTS_FILE} has no tensors")
    return layers
