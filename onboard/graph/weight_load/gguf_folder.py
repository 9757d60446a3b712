"""The weights of a GGUF file, under the names of a checkpoint in safetensors."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path

import torch

from onboard.graph.weight_load.parameters import of_runs
from onboard.graph.weight_load.safetensors_folder import (
    INDEX_FILE,
    SINGLE_FILE,
    Checkpoint,
    TensorMeta,
)
from onboard.quantised.encoded import Encoded
from onboard.quantised.layouts.gguf_blocks import decode, require_decoder
from onboard.quantised.layouts.gguf_names import Place, in_order, places
from onboard.quantised.weight import Files, QuantisedWeight, Tensors
from onboard.sources.gguf_header import GgufHeader, GgufTensor, read_header
from onboard.sources.gguf_rotation import check_rotation
from onboard.sources.gguf_source import GGUF_FILE

_PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True)
class _Form:
    """How ops compute with a type: their codes, inputs of a group, what holds scales exactly."""

    encoding: str
    group: int = 32
    scale_dtype: torch.dtype = torch.float16
    offset: bool = False


_FORMS = {
    "Q4_0": _Form("int4"),
    "Q4_1": _Form("int4", offset=True),
    "Q5_0": _Form("int8"),
    "Q5_1": _Form("int8", offset=True),
    "Q8_0": _Form("int8"),
    "Q4_K": _Form("int4", scale_dtype=torch.float32, offset=True),
    "Q5_K": _Form("int8", scale_dtype=torch.float32, offset=True),
    "Q6_K": _Form("int8", group=16, scale_dtype=torch.float32),
}
"""By type; others are decoded."""


class GgufFiles(Checkpoint):
    """The tensors of `model.gguf` in `folder`: floats as the unquantised model has them, others as
    rows of bytes.
    """

    @property
    def header(self) -> GgufHeader:
        """What the file says of itself."""
        return self._contents[0]

    @property
    def has_blocks(self) -> bool:
        """Whether any tensor has blocks, not numbers."""
        return not all(tensor.kind in _PLAIN for tensor in self.header.tensors.values())

    def kind(self, name: str) -> str:
        """Return the type that a tensor is stored in: "Q4_K"."""
        return self._stored(name).kind

    def elements(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor as the model has it."""
        place, tensor = self._places[name], self._stored(name)
        return place.shape or (tensor.shape if place.expert is None else tensor.shape[1:])

    def names(self) -> dict[str, TensorMeta]:
        """Return every tensor's shape, dtype and size; bytes have the rows of their weight."""
        return {name: self._meta(name) for name in self._places}

    def read(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return one tensor: its numbers, or the bytes of its blocks, with rows in the order of the
        model.
        """
        place, tensor = self._places[name], self._stored(name)
        self._bytes_read += self._meta(name).nbytes
        dtype = _PLAIN.get(tensor.kind, torch.uint8)
        count = tensor.nbytes // dtype.itemsize
        flat = torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=tensor.offset)
        rows = flat.view(*tensor.shape[:-1], -1)
        rows = in_order(rows if place.expert is None else rows[place.expert], place.heads)
        values = rows.float() - 1 if place.is_plus_one else rows
        return values.reshape(self._meta(name).shape).to(device)

    def read_part(
        self,
        name: str,
        kept: Mapping[int, Sequence[tuple[int, int]]],
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """Return runs of entries; the file is mapped, so rows in the file's order are not read beside
        them.
        """
        before, tensor = self._bytes_read, self.read(name)
        for dim, runs in kept.items():
            tensor = of_runs(tensor, dim, runs)
        if not self._places[name].heads:
            self._bytes_read = before + tensor.nbytes
        return tensor.to(device)

    def is_stored(self, name: str) -> bool:
        """Tell whether a tensor has numbers, not blocks."""
        return name in self._places and self.kind(name) in _PLAIN

    def notes(self) -> dict[str, str]:
        """Return nothing: what the header says is in `header`."""
        return {}

    @cached_property
    def _contents(self) -> tuple[GgufHeader, Mapping[str, Place]]:
        file, config = (self.folder / name for name in (GGUF_FILE, "config.json"))
        states = [(path.stat().st_size, path.stat().st_mtime_ns) for path in (file, config)]
        return _read(self.folder, *states)

    @property
    def _places(self) -> Mapping[str, Place]:
        return self._contents[1]

    @cached_property
    def _bytes(self) -> mmap.mmap:
        with (self.folder / GGUF_FILE).open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def _stored(self, name: str) -> GgufTensor:
        return self.header.tensors[self._places[name].tensor]

    def _meta(self, name: str) -> TensorMeta:
        place, tensor, shape = self._places[name], self._stored(name), self.elements(name)
        size = tensor.nbytes // (1 if place.expert is None else tensor.shape[0])
        if tensor.kind not in _PLAIN:
            return TensorMeta((*shape[:-1], tensor.row_bytes), torch.uint8, size)
        return TensorMeta(shape, torch.float32 if place.is_plus_one else _PLAIN[tensor.kind], size)


@dataclass(frozen=True)
class Gguf:
    """A weight for each tensor that is stored in blocks."""

    files: GgufFiles
    description: str = "gguf"

    def layout_of(self, module: str) -> None:
        """Return nothing: the file's header says it."""

    def weights(self, files: Files) -> dict[str, QuantisedWeight]:
        """Return the weights in blocks by name."""
        found = {
            name: self._weight(name) for name in files.names() if not self.files.is_stored(name)
        }
        for kind in sorted({self.files.kind(name) for name in found}):
            require_decoder(kind)
        return found

    def _weight(self, name: str) -> QuantisedWeight:
        kind, shape, parts = self.files.kind(name), self.files.elements(name), {"codes": name}
        if (form := _FORMS.get(kind)) is None:
            return QuantisedWeight(
                name, shape, kind.lower(), parts, lambda found: decode(kind, found["codes"]),
                axes=(0, 1),
            )  # fmt: skip
        return QuantisedWeight(
            name, shape, kind.lower(), parts, partial(_decode, kind, form.scale_dtype), block=(1, form.group),
            scale_dtype=form.scale_dtype, encoding=form.encoding, offset=form.offset, axes=(0, 1),
        )  # fmt: skip


def _decode(kind: str, scale_dtype: torch.dtype, found: Tensors) -> Encoded:
    """Return codes with scales as the file has them."""
    encoded = decode(kind, found["codes"])
    return replace(encoded, scale=encoded.scale.to(scale_dtype))


def gguf_files(folder: Path) -> GgufFiles | None:
    """Return the GGUF file that a folder has for its weights; None where it has safetensors."""
    others = (SINGLE_FILE, INDEX_FILE)
    if any((folder / name).is_file() for name in others) or not (folder / GGUF_FILE).is_file():
        return None
    return GgufFiles(folder)


@lru_cache(maxsize=4)
def _read(folder: Path, *_: tuple[int, int]) -> tuple[GgufHeader, Mapping[str, Place]]:
    """Return a file's header, and where the model's tensors are; once for each state of the file."""
    from transformers import AutoConfig

    from onboard.hf.architecture import decoder_config
    from onboard.hf.hf_model import build_reference
    from onboard.hf.quiet import quiet_transformers

    header = read_header(folder / GGUF_FILE)
    with quiet_transformers(), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        decoder = decoder_config(config)
        model = build_reference(decoder)
    check_rotation(header, folder / GGUF_FILE, decoder)
    return header, places(header, model)
