"""The one form that every quantised weight is brought to: a code for each element, and scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 16 codes of a four-bit float (OCP Microscaling Formats 1.0, section 5.3.3)."""


@dataclass(frozen=True)
class Encoded:
    """A weight [..., outputs, inputs] as codes, of which blocks of `rows` x `columns` share a
    scale.

    An element is `(table[code] or code) * scale + offset`, times its input's `inputs`.
    """

    codes: torch.Tensor
    """[..., outputs, inputs]: float8, int8, or uint8 that index `table`."""
    scale: torch.Tensor
    """[..., ceil(outputs / rows), ceil(inputs / columns)] float32."""
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

    def values(self) -> torch.Tensor:
        """Return the weight in float32, in the model's layout."""
        weight = self._levels() * self._spread(self.scale)
        if self.offset is not None:
            weight += self._spread(self.offset)
        if self.inputs is not None:
            weight *= self.inputs
        return weight.transpose(-1, -2) if self.transposed else weight

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
