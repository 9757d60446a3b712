"""What the first rank tells the others: each step that they are to run with it, and what else
becomes of their caches, as bytes.

The first rank schedules for all. The others have no requests: an order has the numbers of the step
that the first rank has written to its step buffer, and of the block tables what has changed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike
from torch import nn

from onboard.cache.batch import SequenceInfo
from onboard.cache.cached_sequence import CachedSequenceInterface
from onboard.cache.step_buffer import IntArray, Layout, StepSizes, table_names

_HEAD = struct.Struct("=q")
_INTEGER = np.dtype(np.int64)


class Order(IntEnum):
    """What a rank is told to do."""

    CHOOSE = 0
    """Run a step whose tokens are chosen."""
    LOGITS = 1
    """Run a step whose logits are wanted."""
    COPY_STATE = 2
    SHIFT = 3
    FORGET = 4
    END = 5
    """Give the model up."""
    CHOOSE_AGAIN = 6
    """Hear the tokens that were chosen again for the last step."""


class Orders:
    """The first rank's side: `send` takes an order to every other rank, in the order of calls."""

    def __init__(self, info: SequenceInfo, send: Callable[[bytes], None]) -> None:
        self._info, self._send = info, send
        info.written_tables = []  # from here on they are noted; until now all ranks did the same

    def choose(self) -> None:
        """Have the step run that was written last, whose tokens are chosen."""
        self._step(Order.CHOOSE)

    def compute(self) -> None:
        """Have the step run that was written last, whose logits are wanted."""
        self._step(Order.LOGITS)

    def choose_again(self) -> None:
        """Have the tokens taken that are chosen again for the last step."""
        self._say(Order.CHOOSE_AGAIN)

    def copy_state(self, source: int, target: int) -> None:
        """Have recurrent states copied from one slot to another."""
        self._say(Order.COPY_STATE, [source, target])

    def shift(self, slots: IntArray, values: IntArray) -> None:
        """Have position offsets of slots set."""
        self._say(Order.SHIFT, np.concatenate([slots, values]))

    def forget(self) -> None:
        """Have all caches overwritten."""
        self._say(Order.FORGET)

    def end(self) -> None:
        """Have the model given up."""
        self._say(Order.END)

    def _step(self, order: Order) -> None:
        self._send(_HEAD.pack(order) + b"".join(_written(self._info)))

    def _say(self, order: Order, numbers: ArrayLike = ()) -> None:
        self._send(_HEAD.pack(order) + np.asarray(numbers, dtype=_INTEGER).tobytes())


def obey(order: bytes, cache: CachedSequenceInterface, gm: nn.Module) -> bool:
    """Do what the first rank has ordered; return False if that was to give the model up."""
    (code,), rest = _HEAD.unpack_from(order), memoryview(order)[_HEAD.size :]
    match Order(code):
        case Order.CHOOSE:
            _read(rest, cache.info)
            cache.next_tokens(gm)
        case Order.CHOOSE_AGAIN:
            cache.hear_choice()
        case Order.LOGITS:
            _read(rest, cache.info)
            cache.call(gm)
        case Order.COPY_STATE:
            cache.copy_state(*np.frombuffer(rest, _INTEGER).tolist())
        case Order.SHIFT:
            slots, values = np.split(np.frombuffer(rest, _INTEGER), 2)
            cache.shift(slots, values)
        case Order.FORGET:
            cache.forget()
        case Order.END:
            return False
    return True


def _written(info: SequenceInfo) -> Iterator[bytes]:
    """Yield the parts of a step: sizes, numbers for the host, fields, rows of block tables."""
    assert info.written_tables is not None
    layout, tables = info.buffer.layout_of(info.sizes.tokens), info.written_tables
    head = [*info.sizes, info.num_sequences, *info.numbers.tolist(), len(tables)]
    yield np.array([*head, *(each for table in tables for each in table)], _INTEGER).tobytes()
    for name, count in _fields(layout, info.sizes):
        yield layout.host[name][:count].tobytes()
    for first, last, width in tables:
        for group in range(info.num_groups):
            yield layout.host[table_names(group)[0]][first:last, :width].tobytes()
    tables.clear()


def _read(rest: memoryview, info: SequenceInfo) -> None:
    """Write a step's numbers as the first rank has them, after the copy of the step before."""
    reader = _Reader(rest)
    sizes = StepSizes(*reader.numbers(3))
    [info.num_sequences] = reader.numbers(1)
    info.numbers[:] = reader.numbers(len(info.numbers))
    [count] = reader.numbers(1)
    tables = [reader.numbers(3) for _ in range(count)]
    layout = info.buffer.layout_for(sizes.tokens)
    for name, length in _fields(layout, sizes):
        reader.fill(layout.host[name][:length])
    for first, last, width in tables:
        info.buffer.widths[first:last] = width
        for group in range(info.num_groups):
            reader.fill(layout.host[table_names(group)[0]][first:last, :width])
    info.show_inputs(layout, sizes)


def _fields(layout: Layout, sizes: StepSizes) -> Iterator[tuple[str, int]]:
    """Yield the fields that a step has anew, and how many entries of each."""
    for name, count in layout.counts(sizes).items():
        if layout.host[name].ndim == 1:
            yield name, count


class _Reader:
    """Takes an order apart from its front."""

    def __init__(self, rest: memoryview) -> None:
        self._rest, self._at = rest, 0

    def numbers(self, count: int) -> list[int]:
        found: list[int] = self._take(_INTEGER, count).tolist()
        return found

    def fill(self, target: IntArray) -> None:
        target[...] = self._take(target.dtype, target.size).reshape(target.shape)

    def _take(self, dtype: np.dtype[np.generic], count: int) -> IntArray:
        taken = np.frombuffer(self._rest, dtype, count, self._at)
        self._at += taken.nbytes
        return taken
