"""NVIDIA ModelOpt's releases: hf_quant_config.json, or the same in `quantization_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onboard.quantised.layouts.float4 import FourBitFloats
from onboard.quantised.layouts.float8 import EightBits, stems
from onboard.quantised.layouts.integers import PairedRows
from onboard.quantised.layouts.turned_stacks import SCALE as STACK_SCALE
from onboard.quantised.layouts.turned_stacks import turned_stack
from onboard.quantised.methods.settings import check_keys, refusal
from onboard.quantised.weight import Activations, Files, QuantisedWeight

_NAME = "modelopt"
_KEYS = {
    "quant_method",
    "quant_algo",
    "producer",
    "quantization",
    "kv_cache_quant_algo",
    "kv_cache_scheme",
    "exclude_modules",
    "ignore",
    "group_size",
    "config_groups",
    "has_zero_point",
    "pre_quant_scale",
    "quantized_layers",
    "awq_block_size",
    "moe_quant_algo",
}
Layout = EightBits | FourBitFloats | PairedRows
_MIXED = "MIXED_PRECISION"
_NONE = "NONE"
"""Of a config that is for cached keys and values alone."""
_PER_TENSOR = Activations("tensor")
_SCALE = ".weight_scale"


@dataclass(frozen=True)
class ModelOpt:
    """Each layer by the algorithm that the config names for it."""

    algorithm: str
    group: int
    layers: Mapping[str, tuple[str, int]]
    """Layers that have an algorithm and a group of their own."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ModelOpt:
        """Read a `quantization_config`, or hf_quant_config.json."""
        inner = values.get("quantization")
        said = inner if isinstance(inner, Mapping) else values
        check_keys(_NAME, said, _KEYS)
        layers = said.get("quantized_layers") or {}
        if not isinstance(layers, Mapping):
            raise refusal(_NAME, f"quantized_layers = {str(layers)[:60]}")
        algorithm = str(said.get("quant_algo")).upper()
        own = {str(name): _algorithm(each) for name, each in layers.items()}
        for name, group in [(algorithm, _group_size(said)), *own.values()]:
            if name not in (_MIXED, _NONE):
                _layout(name, group)
        return cls(algorithm, _group_size(said), own)

    @property
    def description(self) -> str:
        """In words."""
        return f"{_NAME}, {self.algorithm}"

    def layout_of(self, module: str) -> Layout | None:
        """Return how a layer lies in the files; None: where layers differ it has no algorithm."""
        algorithm, group = self._of_layer(module)
        return None if algorithm in (_MIXED, _NONE) else _layout(algorithm, group)[0]

    def weights(self, files: Files) -> dict[str, QuantisedWeight] | None:
        """Return the quantised weights by name; None: none are."""
        tensors, found = files.names(), {}
        for module in stems(tensors, _SCALE):
            algorithm, how = self._read_as(module)
            weight = how[0].find(tensors, f"{module}.weight", how[1])
            if weight is None:
                raise refusal(_NAME, f"tensors of {module} that are not as {algorithm} has them")
            found[weight.name] = weight
        for stack in (name for name in stems(tensors, STACK_SCALE) if name in tensors):
            algorithm, how = self._read_as(stack)
            if (weight := turned_stack(tensors, stack, *how)) is None:
                raise refusal(_NAME, f"experts in one tensor ({stack}) with {algorithm}")
            found[weight.name] = weight
        return None if not found and (self.algorithm, self.layers) == (_NONE, {}) else found

    def _read_as(self, module: str) -> tuple[str, tuple[Layout, Activations]]:
        algorithm, group = self._of_layer(module)
        return algorithm, _layout(algorithm, group)

    def _of_layer(self, module: str) -> tuple[str, int]:
        if module in self.layers:
            return self.layers[module]
        names = [name for name in self.layers if name and _is_within(module, name)]
        return self.layers[max(names, key=len)] if names else (self.algorithm, self.group)


def _is_within(module: str, name: str) -> bool:
    """Tell whether a layer is the one that a config names, perhaps without the text model's prefix, or
    lies in it.
    """
    return f".{name}." in f".{module}."


def _algorithm(values: object) -> tuple[str, int]:
    if not isinstance(values, Mapping):
        raise refusal(_NAME, f"the layer {str(values)[:60]}")
    return str(values.get("quant_algo")).upper(), _group_size(values)


def _group_size(values: Mapping[str, Any]) -> int:
    size = values.get("group_size") or values.get("awq_block_size") or 0
    return size if type(size) is int and 0 <= size <= 1 << 20 else 0


def _layout(algorithm: str, group: int) -> tuple[Layout, Activations]:
    match algorithm:
        case "FP8":
            return EightBits("_scale"), _PER_TENSOR
        case "FP8_PER_CHANNEL_PER_TOKEN":
            return EightBits("_scale", of_outputs=True), Activations("token")
        case "MXFP8":
            return EightBits("_scale", (1, 32), scale_bytes=1), Activations("group", group=32)
        case "FP8_PB_WO" | "FP8_PB_REAL":
            return EightBits("_scale", (128, 128)), Activations()
        case "NVFP4" | "NVFP4_AWQ":
            whole = ".weight_scale_2"
            return FourBitFloats(16, packed=".weight", whole=whole), Activations(
                "group", "float4_e2m1fn", 16
            )
        case "W4A16_NVFP4" | "W4A8_NVFP4_FP8":  # exact: no op has float8 inputs with these
            return FourBitFloats(16, packed=".weight", whole=".weight_scale_2"), Activations()
        case "MXFP4" | "W4A8_MXFP4_FP8":
            return FourBitFloats(32, packed=".weight"), Activations()
        case "W4A16_AWQ":
            return PairedRows(group or 128), Activations()
        case "W4A8_AWQ":
            return PairedRows(group or 128), _PER_TENSOR
    raise refusal(_NAME, f"quant_algo = {algorithm[:60]}")
