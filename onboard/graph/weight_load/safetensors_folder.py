"""Safetensors checkpoints: what a folder holds, read tensor by tensor, and refused in one line when
it is damaged.

Format: https://huggingface.co/docs/safetensors (eight bytes with the header's length, little
endian; a JSON header; the data). Only the headers are read until a tensor is asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from onboard.errors import OnboardError
from onboard.sources.hub_errors import FETCH_AGAIN, fetch_again
from onboard.sources.language_part import part_of
from onboard.untrusted.bounds import DIMENSIONS, HEADER_BYTES, INDEX_BYTES, INTEGER, read_json
from onboard.untrusted.lfs_pointer import refuse_pointer

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PIECE = 1 << 24
"""Elements of eight bits that are looked at together, as they are widened for it."""

_MALFORMED = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)
"""What reading fields of hostile or damaged JSON can raise."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class TensorMeta:
    """What a header says of one tensor; `nbytes` is its size in the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    offset: int = field(default=0, compare=False)
    """Where its data begin, in bytes from the file's start."""
    is_zero: bool = field(default=False, compare=False)
    """It is known to hold nothing but zeros."""
    is_decoded: bool = field(default=False, compare=False)
    """It stands for codes of a linear layer, [outputs, inputs]."""


class Checkpoint:
    """The weights in `folder`: one file, `model.safetensors` by default, or shards with an index."""

    def __init__(self, folder: Path, single: str = SINGLE_FILE) -> None:
        self.folder, self._single = folder, single
        self._bytes_read = 0
        part = part_of(folder)
        self.prefix = "" if part is None else part.prefix
        """What the names begin with in the files, of a model that is a part of another."""
        self._open_files: dict[tuple[Path, str], Any] = {}

    def names(self) -> dict[str, TensorMeta]:
        """Return every tensor's shape, dtype and size, from the headers alone; damage is an
        `OnboardError`.
        """
        return {name: meta for name, (_, meta) in self._tensors.items()}

    def validate(self) -> None:
        """Check every header, file size and shard; raise `OnboardError` for the first thing that is
        wrong.
        """
        self.names()

    def read(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return one tensor as it is stored; on the CPU it is mapped, not copied: do not write to
        it.
        """
        file, meta = self._tensors[name]
        self._bytes_read += meta.nbytes
        with _readable(file):
            opened = self._opened(file, device)
            return opened.get_tensor(self.prefix + name)  # type: ignore[no-any-return]

    def read_run(
        self, name: str, dim: int, start: int, stop: int, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Return the entries of one of a tensor's dimensions from `start` to `stop`, and read no
        more.
        """
        return self.read_part(name, {dim: [(start, stop)]}, device)

    def read_entry(self, name: str, index: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return an entry of a tensor's first dimension, and read no more."""
        return self.read_run(name, 0, index, index + 1, device)[0]

    def read_part(
        self,
        name: str,
        kept: Mapping[int, Sequence[tuple[int, int]]],
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """Return runs of entries, (start, stop) each, of some of a tensor's dimensions, and read no
        more.
        """
        if not kept:
            return self.read(name, device)
        file, meta = self._tensors[name]
        dims = sorted(kept)
        places = [slice(None)] * len(meta.shape)

        def part(left: Sequence[int]) -> torch.Tensor:
            if not left:
                found: torch.Tensor = stored[tuple(places)]
                self._bytes_read += found.nbytes
                return found
            parts = []
            for run in kept[left[0]] or [(0, 0)]:
                places[left[0]] = slice(*run)
                parts.append(part(left[1:]))
            return parts[0] if len(parts) == 1 else torch.cat(parts, left[0])

        with _readable(file):
            stored = self._opened(file, device).get_slice(self.prefix + name)
            return part(dims)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read so far."""
        return self._bytes_read

    def _opened(self, file: Path, device: torch.device | str) -> Any:
        key = (file, str(device))
        if key not in self._open_files:
            self._open_files[key] = safe_open(file, framework="pt", device=str(device))
        return self._open_files[key]

    def is_stored(self, name: str) -> bool:
        """Tell whether a tensor lies in the file as `read` returns it."""
        return name in self._tensors

    def notes(self) -> dict[str, str]:
        """Return what the headers say besides, as their writers put it there."""
        files = {file for file, _ in self._tensors.values()}
        return {key: value for file in sorted(files) for key, value in read_notes(file).items()}

    def place(self, name: str) -> tuple[Path, TensorMeta]:
        """Return the file that holds a tensor, and where and how it does."""
        return self._tensors[name]

    @cached_property
    def _tensors(self) -> dict[str, tuple[Path, TensorMeta]]:
        """Where each tensor is, by the name that it has in the model."""
        return {
            name.removeprefix(self.prefix): place
            for name, place in self._in_files().items()
            if name.startswith(self.prefix)
        }

    def _in_files(self) -> dict[str, tuple[Path, TensorMeta]]:
        single, index = self.folder / self._single, self.folder / INDEX_FILE
        if single.is_file():
            return {name: (single, meta) for name, meta in read_header(single).items()}
        if index.is_file():
            return self._sharded(read_index(index))
        raise OnboardError(f"{self.folder} has no {self._single}", hint=_what_instead(self.folder))

    def _sharded(self, weight_map: Mapping[str, str]) -> dict[str, tuple[Path, TensorMeta]]:
        headers = {
            shard: read_header(self._shard(shard)) for shard in sorted(set(weight_map.values()))
        }
        for shard, header in headers.items():
            if stray := sorted(name for name in header if weight_map.get(name) != shard):
                raise OnboardError(
                    f"{shard} holds {stray[0]}, which the index does not place there",
                    hint=FETCH_AGAIN,
                )
        for name, shard in weight_map.items():
            if name not in headers[shard]:
                raise OnboardError(
                    f"the index places {name} in {shard}, which does not hold it", hint=FETCH_AGAIN
                )
        return {
            name: (self.folder / shard, headers[shard][name]) for name, shard in weight_map.items()
        }

    def _shard(self, shard: str) -> Path:
        path = PurePosixPath(shard)
        # Lexical on purpose: in a Hub cache the files are links to blobs outside the folder.
        if path.is_absolute() or ".." in path.parts or "\\" in shard:
            raise OnboardError(
                f"{INDEX_FILE} names {shard!r}, a path outside the checkpoint",
                hint="Do not trust it",
            )
        if not (self.folder / path).is_file():
            raise OnboardError(f"the shard {shard} is missing from {self.folder}", hint=FETCH_AGAIN)
        return self.folder / path


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Turn what goes wrong in a file into one line."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise OnboardError(
            f"{file.name} cannot be read: {error}", hint=fetch_again(file)
        ) from error


def read_index(path: Path) -> dict[str, str]:
    """Return the tensor name -> shard file map of an index."""
    try:
        weight_map = read_json(path, INDEX_BYTES, values=None)["weight_map"]
        return {name: str(PurePosixPath(shard)) for name, shard in weight_map.items()}
    except _MALFORMED as error:
        raise OnboardError(
            f"{path.name} is not an index of safetensors shards", hint=fetch_again(path)
        ) from error


def read_header(path: Path) -> dict[str, TensorMeta]:
    """Return what a safetensors file holds; raise `OnboardError` when its header and its size
    disagree.
    """
    refuse_pointer(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise OnboardError(
                f"{path.name} is cut off inside its header ({size} bytes)", hint=fetch_again(path)
            )
        HEADER_BYTES.check(length, path.name)
        header = file.read(length)
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        tensors = {name: _entry(entry, 8 + length) for name, entry in entries.items()}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except _MALFORMED as error:
        raise OnboardError(
            f"{path.name} has a damaged header ({error})", hint=fetch_again(path)
        ) from error
    if 8 + length + end != size:
        problem = "is cut off" if 8 + length + end > size else "is longer than its header says"
        raise OnboardError(
            f"{path.name} {problem}: {size} bytes, not {8 + length + end}", hint=fetch_again(path)
        )
    return tensors


def read_notes(path: Path) -> dict[str, str]:
    """Return the `__metadata__` of a file whose header has been read."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    found = header.get("__metadata__")
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def stored_dtype(name: str) -> torch.dtype:
    """Return the dtype that safetensors calls `name`; raise `ValueError` for one that is not
    read.
    """
    if name not in _DTYPES:
        raise ValueError(f"dtype {name} is not supported")
    return _DTYPES[name]


def _entry(entry: Mapping[str, Any], data: int) -> TensorMeta:
    DIMENSIONS.check(len(entry["shape"]), "a tensor")
    shape, dtype = tuple(map(_size, entry["shape"])), stored_dtype(entry["dtype"])
    begin, end = map(_size, entry["data_offsets"])
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"shape {list(shape)} does not fit {end - begin} bytes of {entry['dtype']}"
        )
    return TensorMeta(shape, dtype, end - begin, data + begin)


def _what_instead(folder: Path) -> str:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return "It holds pickled weights only: safetensors are needed (save it again with save_pretrained)"
    return "Fetch the checkpoint, or ask for random weights (skip_loading_weights)"


def find_non_finite(tensor: torch.Tensor) -> str | None:
    """Return "NaN" or "infinity" when a tensor holds one, without a temporary of the tensor's
    size.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return None
    if tensor.itemsize > 1:
        pieces: Iterable[torch.Tensor] = [tensor]
    else:
        pieces = (piece.float() for piece in torch.split(tensor.reshape(-1), _PIECE))
    for piece in pieces:
        low, high = (float(bound) for bound in torch.aminmax(piece))
        if math.isnan(low):
            return "NaN"
        if math.isinf(low) or math.isinf(high):
            return "infinity"
    return None


def _size(number: object) -> int:
    """Return a number of a header; raise `ValueError` for what is no size of anything."""
    if type(number) is not int or not 0 <= number <= INTEGER.most:
        raise ValueError(f"{str(number)[:40]} is no size")
    return number
