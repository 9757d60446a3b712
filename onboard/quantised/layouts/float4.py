"""Weights in four-bit floats, two in a byte: NVFP4 (groups of 16) and MXFP4 (groups of 32).

Layouts: OCP Microscaling Formats 1.0 for MXFP4; for NVFP4 the files of compressed-tensors, which
divide by the tensor's scale, and of ModelOpt, which multiply by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from onboard.errors import OnboardError
from onboard.quantised.encoded import E2M1, Encoded
from onboard.quantised.packing import nibbles
from onboard.quantised.weight import (
    DAMAGED,
    EXPONENTS,
    NUMBERS,
    Activations,
    QuantisedWeight,
    Tensors,
    neighbours,
    require,
    require_dtype,
    require_scalar,
    require_shape,
)

if TYPE_CHECKING:
    from onboard.graph.weight_load.safetensors_folder import TensorMeta


_WHOLE_BYTES = 4
INVERSE_SCALE = ".input_global_scale"
"""A scale of a layer's inputs that these are multiplied by."""


@dataclass(frozen=True)
class FourBitFloats:
    """Bytes of two codes along the inputs, the first one low, and a scale for each group of
    them.
    """

    group: int
    packed: str = ".weight_packed"
    scale: str = ".weight_scale"
    whole: str | None = None
    """The ending of a scale of the whole tensor."""
    divides: bool = False
    """By the tensor's scale is divided."""
    codes: torch.dtype = torch.uint8
    """What holds two of them."""

    @property
    def kind(self) -> str:
        """The format's name."""
        return "nvfp4" if self.whole else "mxfp4"

    @property
    def block(self) -> tuple[int, int]:
        """What shares a scale."""
        return 1, self.group

    def size(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a weight with its scales."""
        scales = outputs * (inputs // self.group)
        return outputs * inputs // 2 + scales + (_WHOLE_BYTES if self.whole else 0)

    def find(
        self, tensors: Mapping[str, TensorMeta], name: str, activations: Activations
    ) -> QuantisedWeight | None:
        """Return the weight of a name, where it is stored in this layout."""
        stem = name.removesuffix(".weight")
        if stem + self.packed not in tensors:
            return None
        packed = tensors[stem + self.packed]
        if packed.dtype != self.codes:
            return None
        if len(packed.shape) < 2:
            raise OnboardError(
                f"{stem}{self.packed} is {list(packed.shape)}, no matrix", hint=DAMAGED
            )
        outputs, half = packed.shape[-2:]
        require(tensors, stem + self.scale, stem + self.packed)
        require_shape(
            tensors, stem + self.scale, (*packed.shape[:-2], outputs, 2 * half // self.group)
        )
        endings = {"codes": self.packed, "scale": self.scale}
        if self.whole:
            require(tensors, stem + self.whole, stem + self.packed)
            require_dtype(tensors, stem + self.scale, torch.float8_e4m3fn)
            require_dtype(tensors, stem + self.whole, *NUMBERS)
            endings["whole"] = self.whole
        else:
            require_dtype(tensors, stem + self.scale, *EXPONENTS)
        extra = neighbours(tensors, stem, {"a": ".input_scale", "b": INVERSE_SCALE})
        for input_scale in extra.values() if len(packed.shape) == 2 else ():
            require_scalar(tensors, input_scale)
        return QuantisedWeight(
            name,
            (*packed.shape[:-1], 2 * half),
            self.kind,
            {role: stem + ending for role, ending in endings.items()},
            self._decode,
            activations,
            (1, self.group),
            input_scale=next(iter(extra.values()), None),
            unread=tuple(extra.values()),
            axes=(0, 1),
            scale_dtype=torch.float8_e4m3fn if self.whole else torch.uint8,
        )

    def _decode(self, found: Tensors) -> Encoded:
        scale, whole = found["scale"], None
        if scale.dtype == torch.float8_e8m0fnu:
            scale = scale.view(torch.uint8)
        if "whole" in found:
            whole = found["whole"].float().reshape(1)
            if self.divides and not bool(whole.isfinite()):  # its inverse would be 0, and a number
                raise ValueError(f"{self.whole} is {whole.item()}, no scale")
            whole = 1 / whole if self.divides else whole
        codes = nibbles(found["codes"].view(torch.uint8))
        return Encoded(codes, scale, 1, self.group, table=E2M1, whole=whole)


def expert_blocks(tensors: Mapping[str, TensorMeta], stem: str) -> QuantisedWeight:
    """Return a stack of experts as gpt-oss has them: `_blocks` [experts, outputs, groups, 16]
    uint8, `_scales` [experts, outputs, groups] uint8; the model's is [experts, inputs, outputs].
    """
    shape = tensors[f"{stem}_blocks"].shape
    experts, outputs, groups = (*shape, 0, 0, 0)[:3]
    require_dtype(tensors, f"{stem}_blocks", torch.uint8)
    require_shape(tensors, f"{stem}_blocks", (experts, outputs, groups, 16))
    require(tensors, f"{stem}_scales", f"{stem}_blocks")
    require_shape(tensors, f"{stem}_scales", (experts, outputs, groups))
    require_dtype(tensors, f"{stem}_scales", *EXPONENTS)
    return QuantisedWeight(
        stem,
        (experts, groups * 32, outputs),
        "mxfp4",
        {"codes": f"{stem}_blocks", "scale": f"{stem}_scales"},
        _decode_blocks,
        block=(1, 32),
        transposed=True,
        axes=(0, 1),
        scale_dtype=torch.uint8,
    )


def _decode_blocks(found: Tensors) -> Encoded:
    codes = nibbles(found["codes"]).flatten(-2)
    scale = found["scale"].view(torch.uint8)
    return Encoded(codes, scale, 1, 32, table=E2M1, transposed=True)
