"""The tensors of a checkpoint that no quantised weight is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from onboard.errors import OnboardError
from onboard.quantised.said import describe_tensors
from onboard.quantised.weight import DAMAGED, QuantisedWeight

if TYPE_CHECKING:
    from onboard.graph.weight_load.safetensors_folder import TensorMeta


def check_left(left: Mapping[str, TensorMeta], weights: Mapping[str, QuantisedWeight]) -> None:
    """Raise `OnboardError` for codes that no scale was found for, which as numbers are no weights, and
    for a weight that is there unquantised, too: nothing says which of the two counts.
    """
    codes = (
        f"{name} is {str(meta.dtype).removeprefix('torch.')}"
        for name, meta in left.items()
        if name.endswith(".weight") and not meta.dtype.is_floating_point
    )
    if found := next(codes, None) or describe_tensors(left):
        raise OnboardError(
            f"the checkpoint is quantised and lacks a part of a weight ({found}, without its scales)",
            hint=DAMAGED,
        )
    for weight in weights.values():
        if weight.name in left:
            what = f"{weight.name} twice, unquantised and quantised ({weight.tensors[0]})"
            raise OnboardError(f"the checkpoint has {what}", hint=DAMAGED)
