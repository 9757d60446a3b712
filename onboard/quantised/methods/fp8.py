"""Hugging Face's `fp8`: blocks as DeepSeek has them, or scales of a whole tensor; experts may be in
MXFP4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from onboard.quantised.layouts.float4 import FourBitFloats
from onboard.quantised.layouts.float8 import EightBits
from onboard.quantised.methods.settings import check_keys, is_block, one_of, refusal
from onboard.quantised.weight import NOT_QUANTISED, Activations, Files, QuantisedWeight

if TYPE_CHECKING:
    from onboard.graph.weight_load.safetensors_folder import TensorMeta

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
_MXFP4_GROUP = 32
_SCALES = ("_scale_inv", "_scale", ".scale")
"""What a scale is called behind its weight's name, DeepSeek's and AutoFP8's, or behind its layer's,
DeepSeek-V4's; all are multiplied by."""
_EXPERTS = re.compile(r"(^|\.)experts(\.|$)")


@dataclass(frozen=True)
class Fp8:
    """`weight` in float8_e4m3fn with `weight_scale_inv`, which is multiplied by."""

    block: tuple[int, int] | None
    activations: Activations
    has_fp4: bool = False
    """Experts are in MXFP4, two codes in an int8."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Fp8:
        """Read a `quantization_config`."""
        check_keys("fp8", values, _KEYS)
        if values.get("fmt"):
            one_of("fp8", values, "fmt", ("e4m3", "e4m3fn", "float8_e4m3fn"))
        if "scale_fmt" in values:
            one_of("fp8", values, "scale_fmt", ("ue8m0", "float", None))
        if "expert_dtype" in values:
            one_of("fp8", values, "expert_dtype", ("fp8", "fp4", None))
        block = values.get("weight_block_size")
        if block is not None and not is_block(block):
            raise refusal("fp8", f"weight_block_size = {str(block)[:60]}")
        said = {"activation_scheme": "dynamic"} | dict(values)
        scheme = one_of("fp8", said, "activation_scheme", ("dynamic", "static"))
        as_they_come = Activations("group", group=block[1]) if block else Activations("token")
        return cls(
            (block[0], block[1]) if block else None,
            as_they_come if scheme == "dynamic" else Activations("tensor"),
            values.get("expert_dtype") == "fp4",
        )

    @property
    def description(self) -> str:
        """In words."""
        blocks = f", {self.block[0]} x {self.block[1]} blocks" if self.block else ""
        return f"fp8{blocks}{', experts in mxfp4' if self.has_fp4 else ''}"

    def layout_of(self, module: str) -> EightBits | FourBitFloats:
        """Return how a layer lies in the files: the scales of mxfp8 are bytes."""
        if self.has_fp4 and _EXPERTS.search(module):
            return FourBitFloats(_MXFP4_GROUP)
        return EightBits(_SCALES[0], self.block, scale_bytes=1 if self.block == _MXFP8 else 4)

    def weights(self, files: Files) -> dict[str, QuantisedWeight]:
        """Return the weights with scales by name."""
        tensors = files.names()
        found = (self._weight(tensors, name) for name in tensors if not name.endswith(_SCALES))
        return {weight.name: weight for weight in found if weight is not None}

    def _weight(self, tensors: Mapping[str, TensorMeta], name: str) -> QuantisedWeight | None:
        """Return the weight of a name; None: it is not quantised."""
        stem, dtype = name.removesuffix(".weight"), tensors[name].dtype
        places = {each: (stem if each.startswith(".") else name) + each for each in _SCALES}
        scale = next((each for each, at in places.items() if at in tensors), _SCALES[0])
        if dtype == torch.float8_e4m3fn:
            return EightBits(scale, self.block).find(tensors, name, self.activations)
        if not (self.has_fp4 and dtype == torch.int8 and _EXPERTS.search(name)):
            return None
        ending = places[scale].removeprefix(stem)
        layout = FourBitFloats(_MXFP4_GROUP, ".weight", ending, codes=torch.int8)
        return layout.find(tensors, name, NOT_QUANTISED)
