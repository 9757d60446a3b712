"""compressed-tensors' integers of one to eight bits, several in a word, with scales of groups of inputs.

Until its release 0.17 a word has as many numbers as fit into it, and the bits that are left are zeros;
since then numbers run on in the next word. Files do not say which: their sizes do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from onboard.errors import OnboardError
from onboard.quantised.encoded import Encoded
from onboard.quantised.layouts.integers import (
    INDICES,
    WORDS,
    PackedIntegers,
    Part,
    groups_where_mixed,
)
from onboard.quantised.packing import signed, unpacked
from onboard.quantised.weight import (
    DAMAGED,
    Files,
    NotAtHandError,
    Tensors,
    blocks,
    require,
    require_dtype,
    require_matrix,
    require_shape,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from onboard.graph.weight_load.safetensors_folder import TensorMeta
    from onboard.quantised.weight import Activations, QuantisedWeight

_SHAPE, _SCALE = ".weight_shape", ".weight_scale"


@dataclass(frozen=True)
class PackedRows(PackedIntegers):
    """`weight_packed` [outputs, words of inputs], stored with half of the range added."""

    codes = ".weight_packed"
    unread = {"shape": _SHAPE, "input": ".input_scale"}
    bits: int
    group: int | None
    has_zeros: bool = False
    """The scheme is not symmetric: without codes of zero the weights would be others."""
    has_order: bool = False
    """Inputs are in groups in any order, which only `weight_g_idx` says."""
    inputs: int | None = None
    """Of the layer; None: as many as its words have room for."""
    runs_on: bool = True
    """Numbers run on in the next word."""

    def of_layer(self, files: Files, module: str) -> PackedRows:
        """Return the layout of a layer of these files; raise `OnboardError` where its words are of
        another size.
        """
        tensors, words = files.names(), module + self.codes
        if words not in tensors:
            return self
        require_matrix(tensors, words)
        if (inputs := self._inputs(files, module)) is None:
            return self
        shape = tensors[words].shape
        sized = (replace(self, inputs=inputs, runs_on=dense) for dense in (True, False))
        fitting = [each for each in sized if each.words_of(inputs) == shape[1]]
        if not fitting:
            what = f"{words} is {list(shape)}, no words of {inputs} inputs of {self.bits} bits"
            raise OnboardError(what, hint=DAMAGED)
        if len(fitting) > 1 and 32 % self.bits:
            what = f"{words} is {list(shape)}, which {inputs} inputs of {self.bits} bits may fill in two ways"
            raise OnboardError(
                what, hint="A newer and an older compressed-tensors read it differently"
            )
        return fitting[0]

    def words_of(self, count: int) -> int:
        """Return how many words hold so many numbers."""
        return blocks(count * self.bits, 32) if self.runs_on else blocks(count, 32 // self.bits)

    def code_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a weight's words."""
        return 4 * outputs * self.words_of(inputs)

    def _inputs(self, files: Files, module: str) -> int | None:
        """Return a layer's inputs, as `weight_shape` says or else the scales of its groups; None:
        nothing says it, and its words have no room for others.
        """
        tensors, scale = files.names(), module + _SCALE
        try:
            if module + _SHAPE in tensors:
                return _stored_inputs(files, module)
        except NotAtHandError:
            if self.group is None:
                raise
        if self.group is not None and scale in tensors and len(tensors[scale].shape) == 2:
            return tensors[scale].shape[1] * self.group
        if 32 % self.bits:
            require(tensors, module + _SHAPE, module + self.codes)
        return None

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the weight's outputs and inputs, given the words'."""
        return rows, columns * 32 // self.bits if self.inputs is None else self.inputs

    def beside(self, outputs: int, inputs: int, groups: int) -> dict[str, Part]:
        """Return the tensors beside the words, by role."""
        return {
            "scale": Part(_SCALE, (outputs, groups)),
            "zero": Part(
                ".weight_zero_point",
                (self.words_of(outputs), groups),
                self.has_zeros,
                WORDS,
                one_by_one=(outputs, groups),  # as in releases before zeros were packed
            ),
            "groups": Part(".weight_g_idx", (inputs,), self.has_order, INDICES),
        }

    def find(
        self, tensors: Mapping[str, TensorMeta], name: str, activations: Activations
    ) -> QuantisedWeight | None:
        """Return the weight of a name, where it is stored in this layout."""
        weight = super().find(tensors, name, activations)
        if weight is None or self._fills_words(*weight.shape, has_zeros="zero" in weight.parts):
            return weight
        return replace(weight, axes=None)

    def _fills_words(self, outputs: int, inputs: int, *, has_zeros: bool) -> bool:
        """Tell whether each word holds as many numbers as the next one, and no bits are left."""
        counts = (inputs, outputs) if has_zeros else (inputs,)
        return 32 % self.bits == 0 and not any(count * self.bits % 32 for count in counts)

    def decode(self, found: Tensors, group: int) -> Encoded:
        """Return the weight, given its parts."""
        scale = found["scale"]
        if (zero := found.get("zero")) is not None and zero.dtype != torch.int8:
            zero = self._numbers(zero, 0)[: len(scale)]
        codes = self._numbers(found["codes"], 1)[:, : self.inputs]
        groups = groups_where_mixed(found, group, scale)
        return Encoded(codes, scale, 1, group, groups=groups, zero=zero)

    def _numbers(self, words: torch.Tensor, dim: int) -> torch.Tensor:
        return signed(unpacked(words, self.bits, dim, run_on=self.runs_on), self.bits)


def _stored_inputs(files: Files, module: str) -> int:
    """Return the inputs that a layer's `weight_shape` says."""
    tensors, name, words = files.names(), module + _SHAPE, module + PackedRows.codes
    require_shape(tensors, name, (2,))
    require_dtype(tensors, name, *INDICES)
    outputs, inputs = files.read(name).tolist()
    if outputs != tensors[words].shape[0] or inputs < 1:
        shape = list(tensors[words].shape)
        raise OnboardError(f"{name} is [{outputs}, {inputs}], and {words} {shape}", hint=DAMAGED)
    return int(inputs)
