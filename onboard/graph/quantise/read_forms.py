"""Parameters that are parts of quantised weights, filled from a checkpoint: each weight is read, or
encoded, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onboard.errors import OnboardError
from onboard.graph.quantise.four_bit_parts import LINEARS, four_bit_part
from onboard.graph.quantise.int8_parts import int8_part
from onboard.graph.weight_load.converted_weights import Source
from onboard.graph.weight_load.parameters import CACHE_SCALE, Form, Share
from onboard.graph.weight_load.quantised_folder import QuantisedCheckpoint
from onboard.graph.weight_load.safetensors_folder import Checkpoint, find_non_finite
from onboard.graph.weight_load.weight_sources import WRONG_MODEL, read_source
from onboard.ops.linear.fp8_linear import BLOCK
from onboard.quantised.encode_four_bits import encode_int4, encode_mxfp4
from onboard.quantised.encoded import PIECE, Encoded, encode_fp8

if TYPE_CHECKING:
    from onboard.graph.weight_load.converted import ConvertedCheckpoint

Forms = Sequence[tuple[Form, Tensor]]
"""Forms of one weight, and what is to be filled with them."""


def read_forms(
    checkpoint: Checkpoint | ConvertedCheckpoint,
    found: Mapping[str, Source],
    forms: Forms,
    device: torch.device | str,
    share: Share | None = None,
) -> None:
    """Fill parameters with their forms of one weight, which is at `found`, or of a rank's `share`.

    Raises `OnboardError` where shapes differ, or a scale is no number.
    """
    of_weight = []
    for form, target in forms:
        if form.kind in (CACHE_SCALE, "input_scale"):
            assert isinstance(checkpoint, QuantisedCheckpoint)
            target.copy_(_scale_beside(checkpoint, found, form))
        else:
            of_weight.append((form, target))
    if of_weight:
        _read_weight(checkpoint, found[of_weight[0][0].weight], of_weight, device, share)


def _scale_beside(
    checkpoint: QuantisedCheckpoint, found: Mapping[str, Source], form: Form
) -> Tensor:
    if form.kind == CACHE_SCALE:
        return checkpoint.cache_scale(form.weight)
    weights = (checkpoint.weights[found[each].names[0]] for each in (form.weight, *form.beside))
    return torch.tensor([max(map(checkpoint.input_scale, weights))])


def _read_weight(
    checkpoint: Checkpoint | ConvertedCheckpoint,
    source: Source,
    forms: Forms,
    device: torch.device | str,
    share: Share | None,
) -> None:
    name = source.names[0]
    if isinstance(checkpoint, QuantisedCheckpoint) and not checkpoint.is_stored(name):
        _read_encoded(checkpoint, name, forms, device, share)
        return
    for index, matrix in _matrices(checkpoint, source, share, device):
        views = [(form, target if index is None else target[index]) for form, target in forms]
        _encode_pieces(name, matrix.mT if forms[0][0].transposed else matrix, views)


def _matrices(
    checkpoint: Checkpoint | ConvertedCheckpoint,
    source: Source,
    share: Share | None,
    device: torch.device | str,
) -> Iterator[tuple[int | None, Tensor]]:
    """Yield a weight, or the matrices of a stack one after the other, with their places: it may be
    large.
    """
    name, *_ = source.names
    if share is None and source.is_plain and isinstance(checkpoint, Checkpoint):
        shape = checkpoint.names()[name].shape
        if len(shape) > 2:
            for index in range(shape[0]):
                yield index, checkpoint.read_run(name, 0, index, index + 1, device)[0]
            return
    weight = read_source(checkpoint, source, device)
    weight = weight if share is None else share.of(weight)
    yield from enumerate(weight) if weight.dim() > 2 else [(None, weight)]


def _encode_pieces(name: str, weight: Tensor, forms: Forms) -> None:
    """Encode some outputs of a weight after others, each of whole blocks."""
    outputs, inputs = weight.shape
    shared = BLOCK if forms[0][0].block == (BLOCK, BLOCK) else 1
    size = max(1, PIECE // (inputs * shared)) * shared
    for start in range(0, outputs, size):
        piece = weight[start : start + size].contiguous()
        views = [(form, _rows(form, target, start, len(piece))) for form, target in forms]
        _fill(name, _encode(piece, forms[0][0]), views)


def _rows(form: Form, target: Tensor, start: int, count: int) -> Tensor:
    """Return what a parameter has of some outputs."""
    shared = BLOCK if form.kind == "scale" and form.block == (BLOCK, BLOCK) else 1
    return target[start // shared : -(-(start + count) // shared)]


def _read_encoded(
    checkpoint: QuantisedCheckpoint,
    name: str,
    forms: Forms,
    device: torch.device | str,
    share: Share | None,
) -> None:
    found = _encoded(checkpoint, name, device, share)
    if len(checkpoint.weights[name].shape) < 3:
        _fill(name, next(found), forms)
        return
    for index, encoded in enumerate(found):
        _fill(name, encoded, [(form, target[index]) for form, target in forms])


def _encoded(
    checkpoint: QuantisedCheckpoint, name: str, device: torch.device | str, share: Share | None
) -> Iterator[Encoded]:
    """Yield a quantised weight, of a stack one matrix after the other, or a rank's share of it."""
    if len(checkpoint.weights[name].shape) > 2:
        yield from checkpoint.encoded_stack(name, device, share)
    elif share is None:
        yield checkpoint.encoded(name, device)
    else:
        yield checkpoint.encoded_share(name, share, device)


def read_decoded(
    checkpoint: QuantisedCheckpoint,
    name: str,
    target: Tensor,
    device: torch.device | str,
    share: Share | None = None,
) -> None:
    """Fill a parameter with a quantised weight's values, or a rank's share of them: of a stack one
    matrix after the other, of a matrix some outputs after others.

    Raises `OnboardError` where shapes differ, or a value is no number.
    """
    shape = checkpoint.weights[name].shape
    _require_shape(name, shape if share is None else share.own_shape, target)
    is_stack = len(shape) > 2
    found = _encoded(checkpoint, name, device, share)
    for index, encoded in enumerate(found):
        matrix = target[index] if is_stack else target
        for start, piece in encoded.pieces():
            values, dim = piece.values(), 1 if piece.transposed else 0
            view = matrix.narrow(dim, start, values.shape[dim])
            view.copy_(values)
            check_finite(name, values, view)


def check_finite(name: str, tensor: Tensor, target: Tensor) -> None:
    """Raise `OnboardError` where what a parameter was filled with, `tensor`, is no number in it."""
    if problem := find_non_finite(target):
        is_ours = find_non_finite(tensor) is None
        dtype = str(target.dtype).removeprefix("torch.")
        where = f"does not fit {dtype}" if is_ours else "in the checkpoint"
        hint = "Use bfloat16" if is_ours else "Fetch it again"
        raise OnboardError(f"{name} holds {problem}: {where}", hint=hint)


def _encode(weight: Tensor, form: Form) -> Encoded:
    match form.encoding:
        case "int4":
            return encode_int4(weight)
        case "mxfp4":
            return encode_mxfp4(weight)
    return encode_fp8(weight, form.block)


def _fill(name: str, encoded: Encoded, forms: Forms) -> None:
    for form, target in forms:
        tensor = _form(encoded, form)
        _require_shape(name, tensor.shape, target)
        target.copy_(tensor)
        if problem := find_non_finite(target) or _no_exponent(form, target):
            raise OnboardError(f"{name} holds {problem}: in the checkpoint", hint="Fetch it again")


def _require_shape(name: str, shape: Sequence[int], target: Tensor) -> None:
    if tuple(shape) != tuple(target.shape):
        found, expected = list(shape), list(target.shape)
        raise OnboardError(
            f"{name} is {found} in the checkpoint and {expected} in the model", hint=WRONG_MODEL
        )


def _no_exponent(form: Form, target: Tensor) -> str | None:
    """Return "NaN" where exponents hold its code (OCP Microscaling Formats 1.0, section 5.4.1)."""
    is_exponents = form.kind == "scale" and target.dtype == torch.uint8
    return "NaN" if is_exponents and bool((target == 255).any()) else None


def _form(encoded: Encoded, form: Form) -> Tensor:
    if form.encoding in LINEARS:
        return four_bit_part(encoded, form.kind)
    if form.encoding == "int8":
        return int8_part(encoded, form.kind)
    return encoded.form(form.kind, in_blocks=form.block is not None)
