"""Weights in integers of four or eight bits, several in a word, with scales of groups of inputs.

Layouts: those of compressed-tensors, AutoGPTQ (and GPTQModel), AutoAWQ and ModelOpt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from onboard.errors import OnboardError
from onboard.quantised.encoded import Encoded
from onboard.quantised.packing import signed, twos_complement, unpacked
from onboard.quantised.weight import (
    DAMAGED,
    Activations,
    QuantisedWeight,
    Tensors,
    blocks,
    neighbours,
    require,
    require_dtype,
    require_shape,
)

if TYPE_CHECKING:
    from onboard.graph.weight_load.safetensors_folder import TensorMeta

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ keeps each of eight neighbouring outputs in a word."""


@dataclass(frozen=True)
class PackedRows:
    """compressed-tensors' `weight_packed` [outputs, words of inputs], stored with half of the range
    added.
    """

    bits: int
    group: int | None
    """Inputs that share a scale; None: all of an output's."""

    def find(
        self, tensors: Mapping[str, TensorMeta], name: str, activations: Activations
    ) -> QuantisedWeight | None:
        """Return the weight of a name, where it is stored in this layout."""
        stem = name.removesuffix(".weight")
        if f"{stem}.weight_packed" not in tensors:
            return None
        require_dtype(tensors, f"{stem}.weight_packed", torch.int32)
        outputs, words = tensors[f"{stem}.weight_packed"].shape
        inputs = words * 32 // self.bits
        scale = require(tensors, f"{stem}.weight_scale", f"{stem}.weight_packed")
        group = self.group or inputs
        require_shape(tensors, f"{stem}.weight_scale", (outputs, blocks(inputs, group)))
        endings = {
            "codes": ".weight_packed",
            "scale": ".weight_scale",
            "zero": ".weight_zero_point",
            "groups": ".weight_g_idx",
        }
        parts = neighbours(tensors, stem, endings)
        if "zero" in parts:
            packed = blocks(outputs * self.bits, 32)
            require_shape(tensors, parts["zero"], (packed, scale.shape[1]))
        unread = neighbours(tensors, stem, {"shape": ".weight_shape", "input": ".input_scale"})
        return QuantisedWeight(
            name,
            (outputs, inputs),
            f"int{self.bits}",
            parts,
            lambda found: self._decode(found, group),
            activations,
            unread=tuple(unread.values()),
        )

    def _decode(self, found: Tensors, group: int) -> Encoded:
        scale, zero = found["scale"], None
        if "zero" in found:
            zero = signed(unpacked(found["zero"], self.bits, 0)[: len(scale)], self.bits)
        codes = signed(unpacked(found["codes"], self.bits, 1), self.bits)
        groups = found["groups"].long() if "groups" in found else None
        return Encoded(codes, scale, 1, group, groups=groups, zero=zero)


@dataclass(frozen=True)
class Gptq:
    """`qweight` [words of inputs, outputs], `qzeros` [groups, words of outputs], `scales` [groups,
    outputs], `g_idx` [inputs].
    """

    bits: int
    group: int | None
    zero_is_less: bool = True
    """The stored zero is one less than the zero, as in the format's first version."""

    def find(
        self, tensors: Mapping[str, TensorMeta], name: str, activations: Activations
    ) -> QuantisedWeight | None:
        """Return the weight of a name, where it is stored in this layout."""
        stem = name.removesuffix(".weight")
        if f"{stem}.qweight" not in tensors:
            return None
        require_dtype(tensors, f"{stem}.qweight", torch.int32)
        words, outputs = tensors[f"{stem}.qweight"].shape
        inputs = words * 32 // self.bits
        group = self.group or inputs
        count = blocks(inputs, group)
        for ending, shape in {
            ".scales": (count, outputs),
            ".qzeros": (count, outputs * self.bits // 32),
        }.items():
            require(tensors, stem + ending, f"{stem}.qweight")
            require_shape(tensors, stem + ending, shape)
        endings = {
            "codes": ".qweight",
            "scale": ".scales",
            "zero": ".qzeros",
            "groups": ".g_idx",
        }
        parts = neighbours(tensors, stem, endings)
        if "groups" in parts:
            require_shape(tensors, parts["groups"], (inputs,))
        return QuantisedWeight(
            name,
            (outputs, inputs),
            f"int{self.bits}",
            parts,
            lambda found: self._decode(found, group),
            activations,
        )

    def _decode(self, found: Tensors, group: int) -> Encoded:
        codes = signed(unpacked(found["codes"], self.bits, 0).T, self.bits)
        scale = found["scale"].T
        # Of eight bits it may be one more than int8 has
        zero = signed(unpacked(found["zero"], self.bits, 1).T, self.bits).short()
        zero += self.zero_is_less
        runs = torch.arange(codes.shape[1], device=codes.device) // group
        groups = found["groups"].long() if "groups" in found else runs
        if int(groups.min()) < 0 or int(groups.max()) >= scale.shape[1]:
            raise OnboardError("g_idx names a group that has no scale", hint=DAMAGED)
        ordered = torch.equal(groups, runs)
        return Encoded(codes, scale, 1, group, groups=None if ordered else groups, zero=zero)


@dataclass(frozen=True)
class Awq:
    """`qweight` [inputs, words of outputs], `qzeros` [groups, words of outputs], `scales` [groups,
    outputs]; the outputs of a word are out of order.
    """

    group: int | None
    has_zeros: bool = True

    def find(
        self, tensors: Mapping[str, TensorMeta], name: str, activations: Activations
    ) -> QuantisedWeight | None:
        """Return the weight of a name, where it is stored in this layout."""
        stem = name.removesuffix(".weight")
        if f"{stem}.qweight" not in tensors:
            return None
        require_dtype(tensors, f"{stem}.qweight", torch.int32)
        inputs, words = tensors[f"{stem}.qweight"].shape
        group = self.group or inputs
        count = blocks(inputs, group)
        endings = {"codes": ".qweight", "scale": ".scales", "zero": ".qzeros"}
        shapes = {"codes": (inputs, words), "scale": (count, words * 8), "zero": (count, words)}
        for role, ending in endings.items():
            if role == "zero" and not self.has_zeros and stem + ending not in tensors:
                continue
            require(tensors, stem + ending, f"{stem}.qweight")
            require_shape(tensors, stem + ending, shapes[role])
        return QuantisedWeight(
            name,
            (words * 8, inputs),
            "int4",
            neighbours(tensors, stem, endings),
            lambda found: self._decode(found, group),
            activations,
        )

    def _decode(self, found: Tensors, group: int) -> Encoded:
        codes = signed(_in_order(found["codes"]).T, 4)
        zero = signed(_in_order(found["zero"]).T, 4) if "zero" in found else None
        return Encoded(codes, found["scale"].T, 1, group, zero=zero)


def _in_order(words: torch.Tensor) -> torch.Tensor:
    rows, count = words.shape
    places = unpacked(words, 4, 1).view(rows, count, len(_AWQ_ORDER))
    return places[..., list(_AWQ_ORDER)].flatten(1)


@dataclass(frozen=True)
class PairedRows:
    """ModelOpt's four-bit weights: bytes of two outputs [outputs / 2, inputs], in two's
    complement.
    """

    group: int

    def find(
        self, tensors: Mapping[str, TensorMeta], name: str, activations: Activations
    ) -> QuantisedWeight | None:
        """Return the weight of a name, where it is stored in this layout."""
        stem = name.removesuffix(".weight")
        if name not in tensors or tensors[name].dtype != torch.uint8:
            return None
        half, inputs = tensors[name].shape
        require(tensors, f"{stem}.weight_scale", name)
        require_shape(tensors, f"{stem}.weight_scale", (2 * half, blocks(inputs, self.group)))
        endings = {
            "codes": ".weight",
            "scale": ".weight_scale",
            "inputs": ".pre_quant_scale",
        }
        # The second scale is that of the first one's form in a kernel
        unread = neighbours(tensors, stem, {"input": ".input_scale", "whole": ".weight_scale_2"})
        return QuantisedWeight(
            name,
            (2 * half, inputs),
            "int4",
            neighbours(tensors, stem, endings),
            self._decode,
            activations,
            unread=tuple(unread.values()),
        )

    def _decode(self, found: Tensors) -> Encoded:
        data = found["codes"]
        codes = twos_complement(torch.stack([data & 15, data >> 4], dim=1).flatten(0, 1))
        inputs = found["inputs"].float() if "inputs" in found else None
        return Encoded(codes, found["scale"], 1, self.group, inputs=inputs)
