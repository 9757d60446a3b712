"""Methods that need few words: `mxfp4` (gpt-oss), `bitsandbytes`, `fbgemm_fp8`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onboard.quantised.layouts import normal_float4
from onboard.quantised.layouts.float4 import FourBitFloats, expert_blocks
from onboard.quantised.layouts.float8 import EightBits, stems
from onboard.quantised.layouts.turned_stacks import stack_of_outputs
from onboard.quantised.methods.settings import check_keys, one_of, refusal
from onboard.quantised.weight import (
    NUMBERS,
    Activations,
    Files,
    QuantisedWeight,
    require_dtype,
)

_INT8_STEPS = 127.0
"""LLM.int8 (Dettmers et al. 2022) stores the largest absolute value of a row."""


@dataclass(frozen=True)
class Mxfp4:
    """gpt-oss: stacks of experts as blocks and scales."""

    description: str = "mxfp4, groups of 32"

    def layout_of(self, module: str) -> FourBitFloats:
        """Return how stacks lie in the files."""
        return FourBitFloats(32)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Mxfp4:
        """Read a `quantization_config`."""
        check_keys("mxfp4", values, {"quant_method", "modules_to_not_convert", "dequantize"})
        return cls()

    def weights(self, files: Files) -> dict[str, QuantisedWeight]:
        """Return the quantised weights by name."""
        tensors = files.names()
        return {stem: expert_blocks(tensors, stem) for stem in stems(tensors, "_blocks")}


_BITS_AND_BYTES = {
    "quant_method",
    "_load_in_4bit",
    "_load_in_8bit",
    "load_in_4bit",
    "load_in_8bit",
    "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage",
    "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant",
    "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_has_fp16_weight",
    "llm_int8_skip_modules",
    "llm_int8_threshold",
}


@dataclass(frozen=True)
class BitsAndBytes:
    """Four bits by a table, or eight bits by rows."""

    kind: str

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> BitsAndBytes:
        """Read a `quantization_config`."""
        check_keys("bitsandbytes", values, _BITS_AND_BYTES)
        if values.get("load_in_8bit"):
            return cls("int8")
        if not values.get("load_in_4bit"):
            raise refusal("bitsandbytes", "neither load_in_4bit nor load_in_8bit")
        storage = {"bnb_4bit_quant_storage": "uint8"} | dict(values)
        one_of("bitsandbytes", storage, "bnb_4bit_quant_storage", normal_float4.STORAGES)
        return cls(one_of("bitsandbytes", values, "bnb_4bit_quant_type", ("nf4", "fp4")))

    @property
    def description(self) -> str:
        """In words."""
        return f"bitsandbytes, {self.kind}"

    def layout_of(self, module: str) -> EightBits | None:
        """Return how a layer lies in the files; four bits are decoded."""
        return EightBits("_scale", kind="int8", of_outputs=True) if self.kind == "int8" else None

    def weights(self, files: Files) -> dict[str, QuantisedWeight]:
        """Return the quantised weights by name."""
        if self.kind == "int8":
            return self._eight_bits(files)
        names = (f"{stem}" for stem in stems(files.names(), ".absmax"))
        found = {name: normal_float4.find(files, name, self.kind) for name in names}
        return {name: weight for name, weight in found.items() if weight is not None}

    def _eight_bits(self, files: Files) -> dict[str, QuantisedWeight]:
        tensors, found = files.names(), {}
        for stem in stems(tensors, ".SCB"):
            name = f"{stem}.weight"
            require_dtype(tensors, f"{stem}.SCB", *NUMBERS)
            renamed = (
                {name: tensors[name], f"{name}_scale": tensors[f"{stem}.SCB"]}
                if name in tensors
                else {}
            )
            layout = EightBits("_scale", divisor=_INT8_STEPS, kind="int8")
            if (weight := layout.find(renamed, name, Activations())) is None:
                raise refusal("bitsandbytes", f"{stem}.SCB and no int8 weight")
            unread = (f"{stem}.weight_format",) if f"{stem}.weight_format" in tensors else ()
            parts = {"codes": name, "scale": f"{stem}.SCB"}
            found[name] = QuantisedWeight(
                name, weight.shape, "int8", parts, weight.decode, unread=unread
            )
        return found


@dataclass(frozen=True)
class FbgemmFp8:
    """Rows in float8 with a scale each; experts in one tensor, too."""

    description: str = "fbgemm_fp8"

    def layout_of(self, module: str) -> EightBits:
        """Return how every layer lies in the files."""
        return EightBits("_scale", of_outputs=True)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> FbgemmFp8:
        """Read a `quantization_config`."""
        known = {"quant_method", "activation_scale_ub", "modules_to_not_convert"}
        check_keys("fbgemm_fp8", values, known)
        return cls()

    def weights(self, files: Files) -> dict[str, QuantisedWeight]:
        """Return the quantised weights by name."""
        tensors, activations = files.names(), Activations("token")
        found = [
            EightBits("_scale").find(tensors, f"{stem}.weight", activations)
            for stem in stems(tensors, ".weight_scale")
        ]
        stacks = (stem for stem in stems(tensors, "_scale") if stem in tensors)
        found += [stack_of_outputs(tensors, stem, activations) for stem in stacks]
        return {weight.name: weight for weight in found if weight is not None}
