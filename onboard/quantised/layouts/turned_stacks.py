"""Experts in one tensor with inputs first, [experts, inputs, outputs], quantised as if outputs were:
codes and scales of their groups are turned, too.

ModelOpt's files of Llama 4 have `gate_up_proj`, `gate_up_proj_weight_scale` and so on; those of
transformers' `fbgemm_fp8` `gate_up_proj_scale`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from onboard.quantised.encoded import Encoded
from onboard.quantised.layouts.float4 import FourBitFloats
from onboard.quantised.layouts.float8 import EightBits
from onboard.quantised.weight import (
    Activations,
    Layout,
    QuantisedWeight,
    Tensors,
    neighbours,
    require_scalar,
)

if TYPE_CHECKING:
    from onboard.graph.weight_load.safetensors_folder import TensorMeta

SCALE = "_weight_scale"
"""Behind the name of a stack."""


def turned_stack(
    tensors: Mapping[str, TensorMeta], stem: str, layout: Layout, activations: Activations
) -> QuantisedWeight | None:
    """Return the stack `stem`, stored as a layout has the matrices of outputs first; None where it is
    stored otherwise.
    """
    if (named := _named(layout)) is None or len(tensors[stem].shape) != 3:
        return None
    if (found := named.find(_parts_of(tensors, stem), stem, activations)) is None:
        return None
    if isinstance(named, EightBits):
        require_scalar(tensors, found.parts["scale"])
    scales = tuple(neighbours(tensors, stem, {"input": "_input_scale"}).values())
    for name in scales:
        require_scalar(tensors, name)
    return replace(
        _turned_back(found),
        input_scale=next(iter(scales), None) if activations.kind == "tensor" else None,
        unread=scales,
        axes=(1, 0),
    )


def stack_of_outputs(
    tensors: Mapping[str, TensorMeta], stem: str, activations: Activations
) -> QuantisedWeight | None:
    """Return the stack `stem` in float8 with a scale for each output: [experts, 1, outputs] beside
    `gate_up_proj`, [experts, outputs, 1] beside `down_proj`; None: it is no stack in float8.
    """
    if len(tensors[stem].shape) != 3:
        return None
    found = EightBits("_scale").find(_parts_of(tensors, stem), stem, activations)
    return None if found is None else replace(_turned_back(found), axes=None)


def _named(layout: Layout) -> EightBits | FourBitFloats | None:
    """Return a layout with the names that the parts of a stack have; None: stacks never lie so."""
    match layout:
        case FourBitFloats(whole=str()):
            return replace(layout, packed="", scale=SCALE, whole=f"{SCALE}_2")
        case EightBits(block=None, of_outputs=False):
            return replace(layout, scale=SCALE)
    return None


def _parts_of(tensors: Mapping[str, TensorMeta], stem: str) -> dict[str, TensorMeta]:
    return {name: _turned(meta) for name, meta in tensors.items() if name.startswith(stem)}


def _turned_back(found: QuantisedWeight) -> QuantisedWeight:
    """Return a stack as the model has it, given it with outputs first."""
    experts, outputs, inputs = found.shape
    return replace(
        found,
        shape=(experts, inputs, outputs),
        decode=lambda parts: _decoded(found, parts),
        transposed=True,
    )


def _turned(meta: TensorMeta) -> TensorMeta:
    match meta.shape:
        case experts, inputs, outputs:
            return replace(meta, shape=(experts, outputs, inputs))
    return meta


def _decoded(weight: QuantisedWeight, parts: Tensors) -> Encoded:
    """Decode a stack, or one matrix of it, the other way round."""
    turned = {role: part.mT if part.ndim > 1 else part for role, part in parts.items()}
    return replace(weight.decode(turned), transposed=True)
