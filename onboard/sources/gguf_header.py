"""The header of a GGUF file, read within bounds: nothing is built or allocated for a number in it
before that number has been held against the file's own size.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (magic, version, counts; key-value
pairs; of each tensor name, dimensions, type, offset; padding; the data), version 2 or 3, little
endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from onboard.errors import OnboardError
from onboard.sources.gguf_package import block_sizes
from onboard.untrusted.bounds import (
    GGUF_STRING,
    GGUF_TENSORS,
    GGUF_VALUES,
    HEADER_BYTES,
    require_regular,
)
from onboard.untrusted.lfs_pointer import refuse_pointer

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}
_MOST_DIMENSIONS = 4
_MOST_ALIGNMENT = 1 << 16
_KEPT = 4096
"""Items of an array of numbers that are kept; of a longer one only how many there are."""
_FETCH_AGAIN = "Fetch the file again"


@dataclass(frozen=True)
class GgufTensor:
    """What a header says of one tensor."""

    kind: str
    """The name of its type: "Q4_K"."""
    shape: tuple[int, ...]
    """As torch has it: the last dimension is the one that blocks run along."""
    offset: int
    """Where its data begin, in bytes from the file's start."""
    nbytes: int
    block: tuple[int, int]
    """How many elements a block has, and how many bytes."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        elements, size = self.block
        return self.shape[-1] // elements * size


@dataclass(frozen=True)
class GgufHeader:
    """What a file holds."""

    values: Mapping[str, Any]
    """Numbers, texts and short lists of numbers, by key."""
    lengths: Mapping[str, int]
    """How many items each list has."""
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """The name of the architecture: "llama"."""
        return str(self.values.get("general.architecture", ""))

    def of_model(self, key: str) -> Any:
        """Return a value of the architecture's own keys; None where there is none."""
        return self.values.get(f"{self.architecture}.{key}")


def read_header(path: Path) -> GgufHeader:
    """Return what a GGUF file holds; raise `OnboardError` for one that is damaged, cut off, or of a
    version or type that is not known.
    """
    status = path.stat()
    require_regular(path, status)
    refuse_pointer(path)
    with path.open("rb") as file:
        if status.st_size < 24:
            raise _damaged(path.name, f"{status.st_size} bytes are no GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path.name, data).header()


def _damaged(name: str, what: str) -> OnboardError:
    return OnboardError(f"{name} has a damaged header ({what})", hint=_FETCH_AGAIN)


class _Reader:
    """Goes through a header once."""

    def __init__(self, name: str, data: mmap.mmap) -> None:
        self.name, self.data, self.at = name, data, 0

    def header(self) -> GgufHeader:
        if self._bytes(4) != _MAGIC:
            self._fail("it does not begin as a GGUF file")
        version = self._number("I")
        if version not in _VERSIONS:
            swapped = version & 0xFFFF == 0
            what = "big-endian numbers" if swapped else f"version {version}"
            raise OnboardError(
                f"{self.name} has {what}, which onboard cannot read", hint="Convert it again"
            )
        tensors, pairs = self._number("Q"), self._number("Q")
        GGUF_TENSORS.check(tensors, self.name)
        GGUF_VALUES.check(pairs, self.name)
        values, lengths = self._values(pairs)
        if int(values.get("split.count") or 0) > 1:
            raise OnboardError(
                f"{self.name} is one part of {values['split.count']}",
                hint="Merge its parts first: gguf-split --merge",
            )
        entries = [self._entry() for _ in range(tensors)]
        return GgufHeader(values, lengths, self._placed(entries, values))

    def _values(self, pairs: int) -> tuple[dict[str, Any], dict[str, int]]:
        values: dict[str, Any] = {}
        lengths: dict[str, int] = {}
        for _ in range(pairs):
            key, kind = self._text(), self._number("I")
            if key in values or key in lengths:
                self._fail(f"{key[:60]!r} is there twice")
            if kind != _ARRAY:
                values[key] = self._value(kind)
                continue
            item, count = self._number("I"), self._number("Q")
            lengths[key] = count
            if (kept := self._items(item, count)) is not None:
                values[key] = kept
        return values, lengths

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind not in _SCALARS:
            self._fail(f"a value of the unknown type {kind}")
        value = self._number(_SCALARS[kind])
        return bool(value) if kind == _BOOL else value

    def _items(self, kind: int, count: int) -> list[Any] | None:
        """Return a list's numbers; None for one of texts, or a long one."""
        if kind == _STRING:
            for _ in range(count):  # each takes eight bytes at least, of a header that has bounds
                self._skip(self._number("Q"))
            return None
        if kind not in _SCALARS:
            self._fail(f"a list of the unknown type {kind}")
        size = struct.calcsize(_SCALARS[kind])
        if count > _KEPT:
            self._skip(count * size)
            return None
        return list(struct.unpack(f"<{count}{_SCALARS[kind]}", self._bytes(count * size)))

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, count = self._text(), self._number("I")
        if not 1 <= count <= _MOST_DIMENSIONS:
            self._fail(f"{name[:60]} has {count} dimensions")
        sizes = tuple(self._number("Q") for _ in range(count))
        if not all(sizes):
            self._fail(f"{name[:60]} is empty")
        return name, sizes[::-1], self._number("I"), self._number("Q")

    def _placed(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], values: Mapping[str, Any]
    ) -> dict[str, GgufTensor]:
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or alignment.bit_count() != 1 or alignment > _MOST_ALIGNMENT:
            self._fail(f"an alignment of {str(alignment)[:20]}")
        start = -(-self.at // alignment) * alignment
        found: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            if name in found:
                self._fail(f"{name[:60]} is there twice")
            if offset % alignment:
                self._fail(f"{name[:60]} begins between two places")
            found[name] = self._tensor(name, shape, kind, start + offset)
        self._check_places(found)
        return found

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        if kind not in block_sizes():
            raise OnboardError(
                f"{name[:60]} of {self.name} is of type {kind}, which this gguf package does not know",
                hint="A newer one may: pip install -U gguf",
            )
        known, elements, size = block_sizes()[kind]
        if shape[-1] % elements:
            self._fail(f"{name[:60]} has rows of {shape[-1]}, no multiple of {known}'s {elements}")
        nbytes = math.prod(shape) // elements * size
        if offset + nbytes > len(self.data):
            raise OnboardError(
                f"{self.name} is cut off: {len(self.data):,} bytes, and {name[:60]} ends at {offset + nbytes:,}",
                hint=_FETCH_AGAIN,
            )
        return GgufTensor(known, shape, offset, nbytes, (elements, size))

    def _check_places(self, tensors: Mapping[str, GgufTensor]) -> None:
        end = 0
        for name, tensor in sorted(tensors.items(), key=lambda each: each[1].offset):
            if tensor.offset < end:
                self._fail(f"{name[:60]} lies over another tensor")
            end = tensor.offset + tensor.nbytes

    def _text(self) -> str:
        length = self._number("Q")
        GGUF_STRING.check(length, f"a text of {self.name}")
        try:
            return self._bytes(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise _damaged(self.name, "a text that is not UTF-8") from error

    def _number(self, code: str) -> Any:
        size = struct.calcsize(code)
        return struct.unpack(f"<{code}", self._bytes(size))[0]

    def _bytes(self, count: int) -> bytes:
        start = self.at
        self._skip(count)
        return self.data[start : self.at]

    def _skip(self, count: int) -> None:
        if count > len(self.data) - self.at:
            raise OnboardError(
                f"{self.name} is cut off inside its header ({len(self.data):,} bytes)",
                hint=_FETCH_AGAIN,
            )
        self.at += count
        HEADER_BYTES.check(self.at, self.name)

    def _fail(self, what: str) -> NoReturn:
        raise _damaged(self.name, what)
