"""Hugging Face's `fp8`: blocks as DeepSeek has them, or scales of a whole tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from onboard.quantised.layouts.float8 import EightBits
from onboard.quantised.methods.settings import check_keys, is_block, one_of, refusal
from onboard.quantised.weight import Activations, Files, QuantisedWeight

_KEYS = {
    "quant_method",
    "activation_scheme",
    "weight_block_size",
    "fmt",
    "modules_to_not_convert",
    "ignored_layers",
    "dequantize",
    "scale_fmt",
    "expert_dtype",
    "modules_to_convert",
    "kv_cache_scheme",
    "kv_cache_quant_targets",
    "ignore_patterns",
}
_MXFP8 = (1, 32)
_SCALES = ("_scale_inv", "_scale")
"""What a scale is called behind its weight's name: DeepSeek's and AutoFP8's; both are multiplied
by."""


@dataclass(frozen=True)
class Fp8:
    """`weight` in float8_e4m3fn with `weight_scale_inv`, which is multiplied by."""

    block: tuple[int, int] | None
    activations: Activations

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Fp8:
        """Read a `quantization_config`."""
        check_keys("fp8", values, _KEYS)
        if values.get("fmt"):
            one_of("fp8", values, "fmt", ("e4m3", "e4m3fn", "float8_e4m3fn"))
        if "scale_fmt" in values:
            one_of("fp8", values, "scale_fmt", ("ue8m0", "float", None))
        if "expert_dtype" in values:
            one_of("fp8", values, "expert_dtype", ("fp8", None))
        block = values.get("weight_block_size")
        if block is not None and not is_block(block):
            raise refusal("fp8", f"weight_block_size = {str(block)[:60]}")
        said = {"activation_scheme": "dynamic"} | dict(values)
        scheme = one_of("fp8", said, "activation_scheme", ("dynamic", "static"))
        as_they_come = Activations("group", group=block[1]) if block else Activations("token")
        return cls(
            (block[0], block[1]) if block else None,
            as_they_come if scheme == "dynamic" else Activations("tensor"),
        )

    @property
    def description(self) -> str:
        """In words."""
        if self.block is None:
            return "fp8"
        return f"fp8, {self.block[0]} x {self.block[1]} blocks"

    def layout_of(self, module: str) -> EightBits:
        """Return how every layer lies in the files: the scales of mxfp8 are bytes."""
        return EightBits(_SCALES[0], self.block, scale_bytes=1 if self.block == _MXFP8 else 4)

    def weights(self, files: Files) -> dict[str, QuantisedWeight]:
        """Return the weights with scales by name."""
        tensors = files.names()
        found = {}
        for name, meta in tensors.items():
            if meta.dtype != torch.float8_e4m3fn or name.endswith(_SCALES):
                continue
            scale = next((each for each in _SCALES if name + each in tensors), _SCALES[0])
            weight = EightBits(scale, self.block).find(tensors, name, self.activations)
            assert weight is not None, f"{name} has eight bits"
            found[name] = weight
        return found
