"""Parameters that are parts of quantised weights, filled from a checkpoint: each weight is read, or
encoded, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onboard.errors import OnboardError
from onboard.graph.quantise.coded_shares import encoded_share
from onboard.graph.quantise.four_bit_parts import LINEARS, four_bit_part
from onboard.graph.quantise.int8_parts import int8_part
from onboard.graph.weight_load.converted_weights import Source
from onboard.graph.weight_load.parameters import CACHE_SCALE, Form, Share
from onboard.graph.weight_load.quantised_folder import QuantisedCheckpoint
from onboard.graph.weight_load.safetensors_folder import Checkpoint, find_non_finite
from onboard.graph.weight_load.weight_sources import WRONG_MODEL
from onboard.quantised.encode_four_bits import encode_int4, encode_mxfp4
from onboard.quantised.encoded import Encoded, encode_fp8

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
        if share is None:
            _read_encoded(checkpoint, name, forms, device)
        else:
            _fill(name, encoded_share(checkpoint.encoded(name, device), share), forms)
        return
    weight = source.of([checkpoint.read(each, device) for each in source.names])
    weight = weight if share is None else share.of(weight)
    form = forms[0][0]
    weight = weight.mT if form.transposed else weight
    if weight.dim() == 2:
        _fill(name, _encode(weight, form), forms)
        return
    for index, matrix in enumerate(weight):  # of a stack one after the other: it may be large
        views = [(form, target[index]) for form, target in forms]
        _fill(name, _encode(matrix, form), views)


def _read_encoded(
    checkpoint: QuantisedCheckpoint, name: str, forms: Forms, device: torch.device | str
) -> None:
    if forms[0][1].dim() < 3 or not forms[0][0].transposed:
        _fill(name, checkpoint.encoded(name, device), forms)
        return
    for index, encoded in enumerate(checkpoint.encoded_stack(name, device)):
        _fill(name, encoded, [(form, target[index]) for form, target in forms])


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
        if tensor.shape != target.shape:
            found, expected = list(tensor.shape), list(target.shape)
            raise OnboardError(
                f"{name} is {found} in the checkpoint and {expected} in the model", hint=WRONG_MODEL
            )
        target.copy_(tensor)
        if problem := find_non_finite(target) or _no_exponent(form, target):
            raise OnboardError(f"{name} holds {problem}: in the checkpoint", hint="Fetch it again")


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
