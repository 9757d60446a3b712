"""The one form that every quantised weight is brought to: a code for each element, and scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from onboard.quantised.packing import numbers

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 16 codes of a four-bit float (OCP Microscaling Formats 1.0, section 5.3.3)."""


PIECE = 1 << 24
"""Elements that are decoded, or encoded, together."""
LARGEST_FP8 = 448.0
"""Of float8_e4m3fn."""
SMALLEST_SCALE = 1e-12
"""Of a row of zeros."""
_NOTHING = 2.0**-100
"""The largest magnitude of what is none: an exponent's byte of zero stands for 2^-127."""


def is_nothing(values: torch.Tensor) -> bool:
    """Whether no value is one that a weight has; those that are not numbers are."""
    if not values.numel():
        return True
    low, high = values.aminmax()
    return bool(torch.maximum(-low, high) <= _NOTHING)


@dataclass(frozen=True)
class Encoded:
    """A weight [..., outputs, inputs] as codes, of which blocks of `rows` x `columns` share a
    scale.

    An element is `((table[code] or code) - zero) * scale + offset`, times its input's `inputs`.
    """

    codes: torch.Tensor
    """[..., outputs, inputs]: float8, int8, or uint8 that index `table`."""
    scale: torch.Tensor
    """[..., ceil(outputs / rows), ceil(inputs / columns)] float32, or as the format has it:
    16 bits, float8_e4m3fn, or uint8 exponents (E8M0)."""
    rows: int
    columns: int
    offset: torch.Tensor | None = None
    """What is added, float32, a block each."""
    table: tuple[float, ...] | None = None
    """Values of the codes of four bits."""
    groups: torch.Tensor | None = None
    """[inputs] int64: the column of `scale` that an input belongs to, where groups are no runs."""
    inputs: torch.Tensor | None = None
    """[inputs] float32, what an input is multiplied by before the product."""
    transposed: bool = False
    """The model has the weight as [..., inputs, outputs]."""
    whole: torch.Tensor | None = None
    """[1] float32: a scale of the whole weight, which the others are multiplied by."""
    zero: torch.Tensor | None = None
    """The code of zero, integers, a block each; None: 0."""

    def form(self, kind: str, *, in_blocks: bool) -> torch.Tensor:
        """Return the "codes", or their "scale": of blocks as it is, or else [..., outputs]
        float32.
        """
        if kind == "codes":
            return self.codes
        if in_blocks:
            return self.scale
        outputs = self.codes.shape[-2]
        return self.scale[..., 0].repeat_interleave(self.rows, -1)[..., :outputs]

    def values(self) -> torch.Tensor:
        """Return the weight in float32, in the model's layout."""
        scale, weight = numbers(self.scale), self._levels()
        if self.zero is not None:
            weight -= self._spread(self.zero.float())
        weight *= self._spread(scale if self.whole is None else scale * self.whole)
        if self.offset is not None:
            weight += self._spread(self.offset)
        if self.inputs is not None:
            weight *= self.inputs
        return weight.transpose(-1, -2) if self.transposed else weight

    def has_lost_scales(self) -> bool:
        """Tell whether codes stand for numbers, and scales of zero let nothing of them be left."""
        ones = torch.ones_like(self.scale, dtype=torch.float32)
        bare = replace(self, scale=ones, whole=None, inputs=None, offset=None)
        return not is_nothing(bare.values()) and is_nothing(self.values())

    def pieces(self) -> Iterator[tuple[int, Encoded]]:
        """Yield weights of some outputs each, and where they begin: what decoding takes beside the
        values is then small.
        """
        outputs, inputs = self.codes.shape[-2:]
        shared = 1 if self.rows >= outputs else self.rows
        size = max(1, PIECE // (inputs * shared)) * shared
        for start in range(0, outputs, size):
            yield start, self._outputs(start, min(size, outputs - start))

    def with_blocks(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Encoded:
        """Return the same codes with what belongs to blocks changed."""

        def each(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else change(tensor)

        scale = change(self.scale)
        return replace(self, scale=scale, offset=each(self.offset), zero=each(self.zero))

    def by_outputs(self) -> Encoded:
        """Return the same codes [outputs, inputs] with scales of each output."""
        outputs = self.codes.shape[0]
        return replace(
            self.with_blocks(lambda part: part.repeat_interleave(self.rows, 0)[:outputs]), rows=1
        )

    def _outputs(self, start: int, count: int) -> Encoded:
        first = start // self.rows
        blocks = slice(first, max(first + 1, -(-(start + count) // self.rows)))

        def cut(part: torch.Tensor | None) -> torch.Tensor | None:
            return None if part is None else part[..., blocks, :]

        codes, scale = self.codes[..., start : start + count, :], self.scale[..., blocks, :]
        return replace(self, codes=codes, scale=scale, offset=cut(self.offset), zero=cut(self.zero))

    def _levels(self) -> torch.Tensor:
        if self.table is None:
            return self.codes.float()
        levels = torch.tensor(self.table, dtype=torch.float32, device=self.codes.device)
        return levels[self.codes.int()]

    def _spread(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the block's value for each element [..., outputs, inputs]."""
        outputs, inputs = self.codes.shape[-2:]
        if self.groups is not None:
            wide = blocks.index_select(-1, self.groups)
        else:
            wide = blocks.repeat_interleave(self.columns, -1)[..., :inputs]
        return wide.repeat_interleave(self.rows, -2)[..., :outputs, :]


def plain(values: torch.Tensor) -> Encoded:
    """Return numbers [outputs, inputs] as codes of themselves, in float32."""
    scale = torch.ones(1, 1, device=values.device)
    return Encoded(values.to(torch.float32, copy=True), scale, *values.shape)


def encode_fp8(weight: torch.Tensor, block: tuple[int, int] | None = None) -> Encoded:
    """Return a weight [outputs, inputs] in float8_e4m3fn: the largest value of each row, or block, is
    the format's.
    """
    outputs, inputs = weight.shape
    rows, columns = block or (1, inputs)
    padding = (0, -inputs % columns, 0, -outputs % rows)
    padded = torch.nn.functional.pad(weight.float(), padding)
    tiles = padded.view(len(padded) // rows, rows, -1, columns)
    scale = (tiles.abs().amax((1, 3)) / LARGEST_FP8).clamp_min(SMALLEST_SCALE)
    codes = (tiles / scale[:, None, :, None]).flatten(2, 3).flatten(0, 1)
    codes = codes[:outputs, :inputs].clamp(-LARGEST_FP8, LARGEST_FP8)
    return Encoded(codes.to(torch.float8_e4m3fn).contiguous(), scale, rows, columns)
