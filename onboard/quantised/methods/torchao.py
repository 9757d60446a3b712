"""`torchao`: tensors of eight bits in pieces, whose classes stand in the files' headers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from onboard.errors import OnboardError
from onboard.quantised.encoded import Encoded
from onboard.quantised.methods.settings import check_keys, is_block, refusal
from onboard.quantised.weight import (
    DAMAGED,
    NUMBERS,
    Files,
    QuantisedWeight,
    Tensors,
    blocks,
    neighbours,
    require,
    require_dtype,
    require_matrix,
    require_shape,
)

_NAME = "torchao"
_KEYS = {
    "quant_method",
    "quant_type",
    "modules_to_not_convert",
    "include_input_output_embeddings",
    "untie_embedding_weights",
    "quant_type_kwargs",
}
_KINDS = {"Int8Tensor": "int8", "Float8Tensor": "fp8"}
_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_ENDINGS = {"codes": "qdata", "scale": "scale", "zero": "zero_point"}
_LONGEST_NOTE = 10_000


@dataclass(frozen=True)
class TorchAo:
    """Weights in int8 or float8, as torchao's second version of safetensors has them."""

    description: str = _NAME

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> TorchAo:
        """Read a `quantization_config`; the files say more."""
        check_keys(_NAME, values, _KEYS)
        kind = values.get("quant_type")
        default = kind.get("default") if isinstance(kind, Mapping) else None
        named = default.get("_type") if isinstance(default, Mapping) else kind
        return cls(f"{_NAME}, {str(named)[:60]}")

    def layout_of(self, module: str) -> None:
        """Return nothing: the files' headers say it."""

    def weights(self, files: Files) -> dict[str, QuantisedWeight]:
        """Return the quantised weights by name."""
        notes = {name: _note(name, text) for name, text in files.notes().items() if text[:1] == "{"}
        return {
            name: _weight(files, name, note)
            for name, note in notes.items()
            if note.get("_type") not in ("Tensor", None)
        }


def _note(name: str, text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text) if len(text) < _LONGEST_NOTE else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, Mapping):
        raise OnboardError(f"what the header says of {name[:80]} cannot be read", hint=DAMAGED)
    return found


def _weight(files: Files, name: str, note: Mapping[str, Any]) -> QuantisedWeight:
    kind, data = str(note.get("_type")), note.get("_data")
    block = data.get("block_size") if isinstance(data, Mapping) else None
    if kind not in _KINDS or not is_block(block):
        raise refusal(_NAME, f"{kind[:60]} in blocks {str(block)[:60]}")
    tensors, stem = files.names(), name.removesuffix("weight") + "_weight_"
    parts = neighbours(tensors, stem, _ENDINGS)
    for role in ("codes", "scale"):
        require(tensors, stem + _ENDINGS[role], name)
    require_dtype(tensors, parts["codes"], _DTYPES[_KINDS[kind]])
    require_matrix(tensors, parts["codes"])
    shape = tensors[parts["codes"]].shape
    rows, columns = block
    grid = (blocks(shape[0], rows), blocks(shape[1], columns))
    for role in parts.keys() & {"scale", "zero"}:
        require_shape(tensors, parts[role], grid)
    require_dtype(tensors, parts["scale"], *NUMBERS)
    if "zero" in parts:
        require_dtype(tensors, parts["zero"], torch.int8, torch.int32, torch.int64, *NUMBERS)
    whole_rows = rows == 1 and columns == shape[1]
    return QuantisedWeight(
        name,
        tuple(shape),
        _KINDS[kind],
        parts,
        lambda found: _decode(found, rows, columns),
        block=None if whole_rows else (rows, columns),
    )


def _decode(found: Tensors, rows: int, columns: int) -> Encoded:
    scale = found["scale"].float()
    zero = found.get("zero")
    offset = None if zero is None else -(zero.float() * scale)
    return Encoded(found["codes"], scale, rows, columns, offset)
