"""Weights in eight-bit floats or integers, with a scale a tensor, an output or a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from onboard.errors import OnboardError
from onboard.quantised.encoded import Encoded
from onboard.quantised.packing import numbers
from onboard.quantised.weight import (
    DAMAGED,
    EXPONENTS,
    NUMBERS,
    Activations,
    QuantisedWeight,
    Tensors,
    blocks,
    neighbours,
    require,
    require_dtype,
    require_scalar,
)

if TYPE_CHECKING:
    from onboard.graph.weight_load.safetensors_folder import TensorMeta

_EIGHT_BITS = {
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8_e5m2",
    torch.int8: "int8",
}


INPUT_SCALES = {
    "static": ".input_scale",
    "older": ".activation_scale",
    "zero": ".input_zero_point",
    "shape": ".weight_shape",
}
"""Tensors beside a weight that say how its inputs are quantised, and what its own form says."""
INPUT_SCALE_NAMES = (INPUT_SCALES["static"], INPUT_SCALES["older"], ".input_global_scale")


@dataclass(frozen=True)
class EightBits:
    """Weights that keep their name and shape and have a scale beside them."""

    scale: str
    """What the scale's name has behind the weight's, "_scale_inv"; or, with a dot, behind the layer's:
    ".scale"."""
    block: tuple[int, int] | None = None
    """Outputs and inputs of a block; None: scales of a tensor or of outputs."""
    divisor: float = 1.0
    """The scale is divided by it (LLM.int8 has the largest value, not the step)."""
    kind: str = "fp8"
    """The codes: "fp8" or "int8"."""
    scale_bytes: int = 4
    """Of a scale in files that are not here."""
    of_outputs: bool = False
    """In such files, without blocks: each output has a scale."""

    def size(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a weight with its scales, as far as a config says it."""
        scales = outputs if self.of_outputs else 1
        if self.block is not None:
            scales = blocks(outputs, self.block[0]) * blocks(inputs, self.block[1])
        return outputs * inputs + scales * self.scale_bytes

    def find(
        self, tensors: Mapping[str, TensorMeta], name: str, activations: Activations
    ) -> QuantisedWeight | None:
        """Return the weight of a name, where it is stored in this layout."""
        if name not in tensors or tensors[name].dtype not in _EIGHT_BITS:
            return None
        meta = tensors[name]
        if len(meta.shape) < 2:
            raise OnboardError(f"{name} is {list(meta.shape)}, no matrix", hint=DAMAGED)
        require_dtype(tensors, name, *(d for d, kind in _EIGHT_BITS.items() if self.kind in kind))
        stem = name.removesuffix(".weight")
        scale_name = (stem if self.scale.startswith(".") else name) + self.scale
        scale = require(tensors, scale_name, name)
        has_exponents = self.kind == "fp8" and self.block is not None
        require_dtype(tensors, scale_name, *NUMBERS, *(EXPONENTS if has_exponents else ()))
        rows, columns = self._extent(name, meta.shape, scale.shape)
        zero = neighbours(tensors, stem, {"zero": ".weight_zero_point"})
        parts = {"codes": name, "scale": scale_name, **zero}
        beside = neighbours(tensors, stem, INPUT_SCALES)
        return QuantisedWeight(
            name,
            tuple(meta.shape),
            _EIGHT_BITS[meta.dtype],
            parts,
            lambda found: self._decode(found, rows, columns),
            activations,
            None if columns == meta.shape[-1] else (rows, columns),
            _input_scale(tensors, beside) if activations.kind == "tensor" else None,
            tuple(beside.values()),
            axes=(0, 1),
        )

    def _extent(self, name: str, shape: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, int]:
        """Return the outputs and the inputs that share a scale."""
        *outer, outputs, inputs = shape
        found = tuple(size for size in scale if size != 1)
        if self.block is not None and scale:
            rows, columns = self.block
            wanted = (*outer, blocks(outputs, rows), blocks(inputs, columns))
            if tuple(size for size in wanted if size != 1) == found:
                return rows, columns
        elif not found:
            return outputs, inputs
        elif found == (*outer, outputs):
            return 1, inputs
        raise OnboardError(
            f"the scale of {name} is {list(scale)}, which does not fit {list(shape)}", hint=DAMAGED
        )

    def _decode(self, found: Tensors, rows: int, columns: int) -> Encoded:
        codes, raw = found["codes"], found["scale"]
        *outer, outputs, inputs = codes.shape
        grid = (*outer, blocks(outputs, rows), blocks(inputs, columns))
        scale = numbers(raw) / self.divisor
        scale = scale.reshape(()).expand(grid) if raw.numel() == 1 else scale.reshape(grid)
        zero = found.get("zero")
        offset = None if zero is None else -(zero.float().reshape(scale.shape) * scale)
        return Encoded(codes, scale, rows, columns, offset)


def _input_scale(tensors: Mapping[str, TensorMeta], beside: Mapping[str, str]) -> str | None:
    """Return the name of the one scale of a layer's inputs, None where none is stored."""
    name = beside.get("static") or beside.get("older")
    if name is not None:
        require_scalar(tensors, name)
    return name


def stems(tensors: Mapping[str, TensorMeta], ending: str) -> Iterator[str]:
    """Yield what comes before an ending in the names that have it."""
    yield from (name.removesuffix(ending) for name in tensors if name.endswith(ending))
