"""What tensors without values are made of: dtypes, sizes, and the memory that they would take.

What cannot be told, for want of values or of a rule, is an `UnsureError`: nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


class UnsureError(Exception):
    """A model's code does something that shapes alone do not tell."""


class DType:
    """A torch.dtype by name."""

    def __init__(self, name: str, itemsize: int, rank: int) -> None:
        self.name = name
        self.itemsize = itemsize
        self.rank = rank
        """Of the kinds bool, integer, floating-point, complex: 0 to 3."""

    @property
    def is_floating_point(self) -> bool:
        """Whether it is one of the floating-point dtypes."""
        return self.rank == 2

    @property
    def is_complex(self) -> bool:
        """Whether it is one of the complex dtypes."""
        return self.rank == 3

    def __repr__(self) -> str:
        return f"torch.{self.name}"

    def __reduce__(self) -> str:
        return self.name


BOOL, UINT8, INT32, INT64 = (
    DType("bool", 1, 0),
    DType("uint8", 1, 1),
    DType("int32", 4, 1),
    DType("int64", 8, 1),
)
FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = (
    DType("float16", 2, 2),
    DType("bfloat16", 2, 2),
    DType("float32", 4, 2),
    DType("float64", 8, 2),
)
FLOAT8, COMPLEX64, COMPLEX128 = (
    DType("float8_e4m3fn", 1, 2),
    DType("complex64", 8, 3),
    DType("complex128", 16, 3),
)
DTYPES = {
    each.name: each
    for each in (BOOL, UINT8, INT32, INT64, FLOAT16, BFLOAT16, FLOAT32, FLOAT64, FLOAT8)
    + (COMPLEX64, COMPLEX128)
}


class Memory:
    """The bytes of all tensors that something holds, and the most that there were at a time."""

    def __init__(self) -> None:
        self.default = FLOAT32
        self.live = self.peak = 0
        self.before_last_linear = 0
        """The most before the linear layer that was computed last: a model's head, in the end."""
        self.tokens = 0
        """A prime: sizes that it divides are numbers of tokens, and have to stay whole; 0: none
        are.
        """

    def add(self, num_bytes: int) -> None:
        """Count bytes that came, or went when negative."""
        self.live += num_bytes
        self.peak = max(self.peak, self.live)


MEMORY = Memory()


def keep_whole(size: int) -> None:
    """Refuse what takes tokens apart or mixes them: in a run that an operator does alone."""
    if MEMORY.tokens and size and size % MEMORY.tokens == 0:
        raise UnsureError("tokens are mixed outside of an operator")


class Storage:
    """What tensors that are views of one another share; it counts for as long as one of them is
    held.
    """

    __slots__ = ("num_bytes",)

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        MEMORY.add(num_bytes)

    def __del__(self) -> None:
        MEMORY.add(-self.num_bytes)


WEIGHTS = Storage(0)
"""Of all weights and tables: they are no activations."""


class Size(tuple[int, ...]):
    """A torch.Size."""

    __slots__ = ()

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self)

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Size(found) if isinstance(index, slice) else found

    def __add__(self, other: Any) -> Size:
        return Size(super().__add__(tuple(other)))


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape that operands of these shapes are brought to."""
    sizes: list[int] = []
    for dim in range(1, max(map(len, shapes)) + 1):
        found = {shape[-dim] for shape in shapes if len(shape) >= dim} - {1}
        if len(found) > 1:
            raise UnsureError(f"shapes {shapes} do not go together")
        sizes.append(found.pop() if found else 1)
    return tuple(reversed(sizes))
