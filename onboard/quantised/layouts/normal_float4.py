"""bitsandbytes' four-bit weights: codes of a table in blocks of a flat weight, scales perhaps
quantised themselves (QLoRA, Dettmers et al. 2023, section 3).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from onboard.errors import OnboardError
from onboard.quantised.encoded import Encoded
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
)
from onboard.untrusted.bounds import INTEGER

if TYPE_CHECKING:
    from onboard.graph.weight_load.safetensors_folder import TensorMeta

_STATE = ".quant_state.bitsandbytes__"
_STATE_BYTES = 4096
STORAGES = {
    name: getattr(torch, name)
    for name in ("uint8", "int8", "bfloat16", "float16", "float32", "float64")
}
"""Dtypes whose elements the bytes of codes may lie in (`bnb_4bit_quant_storage`): FSDP shards weights of
one dtype alone.
"""
_CODES, _NESTED_CODES = 16, 256
"""Codes that a table has values for."""
_ENDINGS = {
    "codes": "",
    "scale": ".absmax",
    "table": ".quant_map",
    "nested_scale": ".nested_absmax",
    "nested_table": ".nested_quant_map",
}


def find(files: Files, name: str, kind: str) -> QuantisedWeight | None:
    """Return the weight of a name, where it is stored so: `kind` is "nf4" or "fp4"."""
    tensors, state_name = files.names(), f"{name}{_STATE}{kind}"
    if state_name not in tensors:
        return None
    for role in ("codes", "scale", "table"):
        require(tensors, name + _ENDINGS[role], state_name)
    require_dtype(tensors, name, *STORAGES.values())
    _check_scales(tensors, name)
    state = _state(files, state_name)
    outputs, inputs = state["shape"]
    if tensors[name].nbytes * 2 != blocks(outputs * inputs, 2) * 2:
        raise OnboardError(
            f"{name} has {tensors[name].nbytes} bytes, not those of {outputs} x {inputs}",
            hint=DAMAGED,
        )
    _check_sizes(tensors, name, state)
    return QuantisedWeight(
        name,
        (outputs, inputs),
        kind,
        neighbours(tensors, name, _ENDINGS),
        lambda found: _decode(found, state),
        unread=(state_name,),
    )


def _check_scales(tensors: Mapping[str, TensorMeta], name: str) -> None:
    """Raise `OnboardError` for scales that are none: bytes where they are quantised themselves, which
    only other scales and a table say, else numbers.
    """
    numbers = {name + _ENDINGS["table"]}
    scale, *nested = (name + _ENDINGS[role] for role in ("scale", "nested_scale", "nested_table"))
    if tensors[scale].dtype == torch.uint8:
        numbers.update(nested)
    else:
        numbers.add(scale)
    for each in sorted(numbers):
        require(tensors, each, scale)
        require_dtype(tensors, each, *NUMBERS)


def _check_sizes(tensors: Mapping[str, TensorMeta], name: str, state: Mapping[str, Any]) -> None:
    """Raise `OnboardError` for scales or tables of other sizes than blocks and codes ask for."""
    count = blocks(math.prod(state["shape"]), state["block"])
    sizes = {"table": _CODES, "scale": count}
    if tensors[name + _ENDINGS["scale"]].dtype == torch.uint8:
        nested = blocks(count, state["nested_block"])
        sizes |= {"nested_table": _NESTED_CODES, "nested_scale": nested}
    for role, size in sizes.items():
        each = name + _ENDINGS[role]
        if (found := math.prod(tensors[each].shape)) != size:
            raise OnboardError(f"{each} has {found} numbers, not {size}", hint=DAMAGED)


def _state(files: Files, name: str) -> dict[str, Any]:
    """Return what a weight's JSON says: shape, block sizes, what is added to nested scales."""
    if files.names()[name].nbytes > _STATE_BYTES:
        raise OnboardError(f"{name} has more than {_STATE_BYTES} bytes", hint=DAMAGED)
    try:
        said = json.loads(bytes(files.read(name).tolist()))
        shape = [int(size) for size in said["shape"]]
        block, nested = int(said["blocksize"]), int(said.get("nested_blocksize") or 1)
        offset = float(said.get("nested_offset") or 0.0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise OnboardError(f"{name} is not what bitsandbytes writes", hint=DAMAGED) from error
    if len(shape) != 2 or not all(0 < size <= INTEGER.most for size in (*shape, block, nested)):
        raise OnboardError(f"{name} has impossible sizes", hint=DAMAGED)
    return {"shape": shape, "block": block, "nested_block": nested, "nested_offset": offset}


def _decode(found: Tensors, state: Mapping[str, Any]) -> Encoded:
    outputs, inputs = state["shape"]
    data = found["codes"].flatten().view(torch.uint8)
    codes = torch.stack([data >> 4, data & 15], dim=-1).flatten()[: outputs * inputs]
    scale = found["scale"]
    if "nested_scale" in found:
        nested = (
            found["nested_scale"]
            .flatten()
            .repeat_interleave(state["nested_block"])[: scale.numel()]
        )
        scale = (
            found["nested_table"].flatten()[scale.int().flatten()] * nested + state["nested_offset"]
        )
    scale, block = scale.flatten().float(), state["block"]
    table = tuple(found["table"].flatten().tolist())
    if inputs % block == 0:
        return Encoded(codes.view(outputs, inputs), scale.view(outputs, -1), 1, block, table=table)
    # Blocks that run over the end of a row: a scale an element
    wide = scale.repeat_interleave(block)[: outputs * inputs]
    return Encoded(codes.view(outputs, inputs), wide.view(outputs, inputs), 1, 1, table=table)
