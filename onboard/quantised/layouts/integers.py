"""Weights in integers of two to eight bits, several in a word, with scales of groups of inputs.

Layouts: those of AutoGPTQ (and GPTQModel), AutoAWQ and ModelOpt; that of compressed-tensors is in
`packed_rows`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from onboard.quantised.encoded import Encoded
from onboard.quantised.packing import (
    one_more,
    signed,
    twos_complement,
    unpacked,
    unpacked_planes,
)
from onboard.quantised.weight import (
    NUMBERS,
    Activations,
    QuantisedWeight,
    Tensors,
    blocks,
    neighbours,
    require,
    require_dtype,
    require_matrix,
    require_shape,
)

if TYPE_CHECKING:
    from onboard.graph.weight_load.safetensors_folder import TensorMeta

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ keeps each of eight neighbouring outputs in a word."""
OF_INPUTS = (".weight_g_idx", ".g_idx", ".pre_quant_scale")
"""How names of tensors end that say something of a layer's inputs."""


@dataclass(frozen=True)
class Part:
    """A tensor beside the codes: how its name ends, its shape where that is checked, its dtypes."""

    ending: str
    shape: tuple[int, ...] | None = None
    needed: bool = True
    dtypes: tuple[torch.dtype, ...] = NUMBERS
    one_by_one: tuple[int, ...] | None = None
    """Its shape where codes of four or eight bits are not packed, each an int8."""

    def check(self, tensors: Mapping[str, TensorMeta], name: str) -> None:
        """Raise `OnboardError` where a tensor is none that the layout has."""
        apart = self.one_by_one is not None and tensors[name].dtype == torch.int8
        shape = self.one_by_one if apart else self.shape
        require_dtype(tensors, name, *self.dtypes, *([torch.int8] if apart else []))
        if shape is not None:
            require_shape(tensors, name, shape)


WORDS = (torch.int32,)
INDICES = (torch.int32, torch.int64)


class PackedIntegers(ABC):
    """Codes in words of which each holds several, and the tensors beside them."""

    codes: ClassVar[str]
    """How the name of the words ends."""
    words: ClassVar[torch.dtype] = torch.int32
    scale_bytes: ClassVar[int] = 2
    """Of a scale in files that are not here."""
    axes: ClassVar[tuple[int, int]] = (0, 1)
    """As `QuantisedWeight.axes`."""
    unread: ClassVar[Mapping[str, str]] = {}
    """How names of tensors end that say nothing of the weight, by what they are."""
    bits: int
    group: int | None
    """Inputs that share a scale; None: all of an output's."""

    @abstractmethod
    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the weight's outputs and inputs, given the words'."""

    @abstractmethod
    def beside(self, outputs: int, inputs: int, groups: int) -> dict[str, Part]:
        """Return the tensors beside the words, by role."""

    @abstractmethod
    def decode(self, found: Tensors, group: int) -> Encoded:
        """Return the weight, given its parts."""

    @property
    def kind(self) -> str:
        """The codes."""
        return f"int{self.bits}"

    @property
    def block(self) -> tuple[int, int] | None:
        """What shares a scale; None: all of an output's inputs."""
        return None if self.group is None else (1, self.group)

    def size(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a weight with what its scheme needs beside the codes."""
        beside = self.beside(outputs, inputs, blocks(inputs, self.group or inputs))
        needed = {role: part.shape for role, part in beside.items() if part.needed and part.shape}
        widths = {"scale": self.scale_bytes}
        parts = (math.prod(shape) * widths.get(role, 4) for role, shape in needed.items())
        return self.code_bytes(outputs, inputs) + sum(parts)

    def code_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a weight's words."""
        return outputs * inputs * self.bits // 8

    def find(
        self, tensors: Mapping[str, TensorMeta], name: str, activations: Activations
    ) -> QuantisedWeight | None:
        """Return the weight of a name, where it is stored in this layout."""
        stem = name.removesuffix(".weight")
        words = stem + self.codes
        if words not in tensors:
            return None
        require_dtype(tensors, words, self.words)
        require_matrix(tensors, words)
        rows, columns = tensors[words].shape
        outputs, inputs = self.shape(rows, columns)
        group = self.group or inputs
        beside = self.beside(outputs, inputs, blocks(inputs, group))
        for part in beside.values():
            if part.needed:
                require(tensors, stem + part.ending, words)
            if stem + part.ending in tensors:
                part.check(tensors, stem + part.ending)
        endings = {role: part.ending for role, part in beside.items()}
        return QuantisedWeight(
            name,
            (outputs, inputs),
            self.kind,
            neighbours(tensors, stem, {"codes": self.codes, **endings}),
            partial(self.decode, group=group),
            activations,
            self.block,
            unread=tuple(neighbours(tensors, stem, self.unread).values()),
            axes=self.axes,
            scale_dtype=tensors[stem + beside["scale"].ending].dtype,
        )


@dataclass(frozen=True)
class Gptq(PackedIntegers):
    """`qweight` [words of inputs, outputs], `qzeros` [groups, words of outputs], `scales` [groups,
    outputs], `g_idx` [inputs].
    """

    codes, axes = ".qweight", (1, 0)
    bits: int
    group: int | None
    zero_is_less: bool = True
    """The stored zero is one less than the zero, as in the format's first version."""
    has_order: bool = False
    """Inputs are in groups in any order, which only `g_idx` says."""
    stores_order: bool = True
    """Files have `g_idx` even where it says nothing."""
    in_planes: bool = False
    """The bits of a number lie apart, so that none runs on in the next word."""

    def size(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a weight with what its writers put beside the codes."""
        unasked = self.stores_order and not self.has_order
        return super().size(outputs, inputs) + 4 * inputs * unasked

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the weight's outputs and inputs, given the words'."""
        return columns, rows * 32 // self.bits

    def beside(self, outputs: int, inputs: int, groups: int) -> dict[str, Part]:
        """Return the tensors beside the words, by role."""
        return {
            "scale": Part(".scales", (groups, outputs)),
            "zero": Part(".qzeros", (groups, outputs * self.bits // 32), dtypes=WORDS),
            "groups": Part(".g_idx", (inputs,), self.has_order, INDICES),
        }

    def decode(self, found: Tensors, group: int) -> Encoded:
        """Return the weight, given its parts."""
        codes = signed(self._numbers(found["codes"], 0).T, self.bits)
        scale, zero = found["scale"].T, signed(self._zeros(found["zero"]).T, self.bits)
        return Encoded(
            codes, scale, 1, group, groups=groups_where_mixed(found, group, scale), zero=zero
        )

    def _numbers(self, words: torch.Tensor, dim: int) -> torch.Tensor:
        unpack = unpacked_planes if self.in_planes else unpacked
        return unpack(words, self.bits, dim)

    def _zeros(self, words: torch.Tensor) -> torch.Tensor:
        """Return the zeros [groups, outputs]: one more than is stored, of a whole word at once where
        its numbers fill it, as its writers take one away.
        """
        if self.zero_is_less and 32 % self.bits == 0:
            return self._numbers(one_more(words, self.bits), 1)
        return (self._numbers(words, 1) + self.zero_is_less) & ((1 << self.bits) - 1)


def groups_where_mixed(found: Tensors, group: int, scale: torch.Tensor) -> torch.Tensor | None:
    """Return the group [inputs] of each input, None where groups are runs; `scale` is [outputs,
    groups].
    """
    if "groups" not in found:
        return None
    groups = groups_of_inputs(found["groups"], group)
    if int(groups.min()) < 0 or int(groups.max()) >= scale.shape[1]:
        raise ValueError("g_idx names a group that has no scale")
    return None if torch.equal(groups, _runs(groups, group)) else groups


def groups_of_inputs(stored: torch.Tensor, group: int) -> torch.Tensor:
    """Return the group [inputs] int64 of each input as files have it; compressed-tensors may write -1
    where inputs have no order of their own.
    """
    groups = stored.flatten().long()
    return _runs(groups, group) if bool((groups == -1).all()) else groups


def _runs(groups: torch.Tensor, group: int) -> torch.Tensor:
    return torch.arange(len(groups), device=groups.device) // group


@dataclass(frozen=True)
class Awq(PackedIntegers):
    """`qweight` [inputs, words of outputs], `qzeros` [groups, words of outputs], `scales` [groups,
    outputs]; the outputs of a word are out of order.
    """

    codes, axes, bits = ".qweight", (1, 0), 4
    group: int | None
    has_zeros: bool = True

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the weight's outputs and inputs, given the words'."""
        return columns * 8, rows

    def beside(self, outputs: int, inputs: int, groups: int) -> dict[str, Part]:
        """Return the tensors beside the words, by role."""
        return {
            "scale": Part(".scales", (groups, outputs)),
            "zero": Part(".qzeros", (groups, outputs // 8), self.has_zeros, WORDS),
        }

    def decode(self, found: Tensors, group: int) -> Encoded:
        """Return the weight, given its parts."""
        codes = signed(_in_order(found["codes"]).T, 4)
        zero = signed(_in_order(found["zero"]).T, 4) if "zero" in found else None
        return Encoded(codes, found["scale"].T, 1, group, zero=zero)


def _in_order(words: torch.Tensor) -> torch.Tensor:
    rows, count = words.shape
    places = unpacked(words, 4, 1).view(rows, count, len(_AWQ_ORDER))
    return places[..., list(_AWQ_ORDER)].flatten(1)


@dataclass(frozen=True)
class PairedRows(PackedIntegers):
    """ModelOpt's four-bit weights: bytes of two outputs [outputs / 2, inputs], in two's
    complement.
    """

    codes, words, bits, scale_bytes = ".weight", torch.uint8, 4, 4
    # The second scale is that of the first one's form in a kernel
    unread = {"input": ".input_scale", "whole": ".weight_scale_2"}
    group: int

    def find(
        self, tensors: Mapping[str, TensorMeta], name: str, activations: Activations
    ) -> QuantisedWeight | None:
        """Return the weight of a name, where it is stored in this layout."""
        if name not in tensors or tensors[name].dtype != self.words:
            return None  # it is not quantised
        return super().find(tensors, name, activations)

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the weight's outputs and inputs, given the words'."""
        return 2 * rows, columns

    def beside(self, outputs: int, inputs: int, groups: int) -> dict[str, Part]:
        """Return the tensors beside the words, by role."""
        return {
            "scale": Part(".weight_scale", (outputs, groups)),
            "inputs": Part(".pre_quant_scale", (inputs,), needed=False),
        }

    def decode(self, found: Tensors, group: int) -> Encoded:
        """Return the weight, given its parts."""
        data = found["codes"]
        codes = twos_complement(torch.stack([data & 15, data >> 4], dim=1).flatten(0, 1))
        inputs = found["inputs"].float() if "inputs" in found else None
        return Encoded(codes, found["scale"], 1, group, inputs=inputs)
