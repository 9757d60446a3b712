"""Whether the weights of a checkpoint can be used: those of its config's model, readable, and
finite numbers all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onboard.errors import OnboardError
from onboard.hub import HubSource, ModelSource, has_weights

if TYPE_CHECKING:
    import torch

    from onboard.graph.weight_load.safetensors_folder import TensorMeta
    from onboard.quantised.weight import Method


def stored_tensors(source: ModelSource, method: Method | None) -> dict[str, TensorMeta]:
    """Return what the headers say, of the files that are here or else of the Hub's, as the
    unquantised model would have it; empty when neither is at hand.

    `method` is how the weights are quantised.
    """
    from onboard.graph.weight_load.quantised_folder import open_checkpoint

    if has_weights(source.files()):
        if not (found := open_checkpoint(source.weights()).names()):
            raise OnboardError(
                f"the weight files of {source.model} have no tensor in them",
                hint="Fetch or save the checkpoint again",
            )
        return found
    return _of_the_hub(source, method) if isinstance(source, HubSource) else {}


def _of_the_hub(source: HubSource, method: Method | None) -> dict[str, TensorMeta]:
    from onboard.graph.weight_load.quantised_folder import as_in_model, decoded_names
    from onboard.graph.weight_load.safetensors_folder import TensorMeta, stored_dtype
    from onboard.quantised.read_method import refuse_unsaid
    from onboard.quantised.weight import Headers, NotAtHandError

    try:
        described = {
            name: (shape, stored_dtype(dtype)) for name, (dtype, shape) in source.tensors.items()
        }
    except ValueError as error:
        raise OnboardError(f"the weights of {source.model} cannot be read: {error}") from error
    stored = {
        name: TensorMeta(shape, dtype, math.prod(shape) * dtype.itemsize)
        for name, (shape, dtype) in described.items()
    }
    if method is None:
        refuse_unsaid(stored)
        return stored
    try:
        weights = as_in_model(method.weights(Headers(stored)) or {}, stored, source.files())
        return decoded_names(stored, weights)
    except NotAtHandError:
        return {}


def check_fit(model: Any, tensors: dict[str, TensorMeta]) -> list[str]:
    """Compare a checkpoint with transformers' `model`, on the meta device, which is of no use
    afterwards.

    Returns:
        Facts: what of the checkpoint is left out, and why.

    Raises:
        OnboardError: tensors are missing, of another shape, no weights, or unknown to the model; or
            quantised as those of linear layers where the model has inputs first.
    """
    from onboard.graph.weight_load.rehearsed_load import rehearse_load

    _refuse_turned(model, tensors)
    rehearsal = rehearse_load(model, tensors)
    if misfits := rehearsal.misfits:
        more = f" (and {len(misfits) - 1} more like it)" if len(misfits) > 1 else ""
        raise OnboardError(
            f"the checkpoint does not fit its config.json: {misfits[0]}{more}",
            hint="Fetch the checkpoint again; weights and config.json have to be of one model",
        )
    return rehearsal.facts


def _refuse_turned(model: Any, tensors: dict[str, TensorMeta]) -> None:
    """Raise `OnboardError` for quantised weights of GPT-2's layers, whose shape may not tell that they
    lie the other way.
    """
    from transformers.pytorch_utils import Conv1D

    turned = {f"{name}.weight" for name, each in model.named_modules() if isinstance(each, Conv1D)}
    for name in (name for name, meta in tensors.items() if meta.is_decoded and turned):
        if any(name.endswith(each) or each.endswith(f".{name}") for each in turned):
            raise OnboardError(
                f"{name} is quantised as a linear layer's, and the model's has inputs first, which onboard cannot read",
                hint="Use an unquantised release of the model",
            )


def check_weights(folder: Path, tied: Iterable[tuple[str, str]] = ()) -> None:
    """Read every tensor once; raise `OnboardError` for a damaged file, a missing shard, a NaN or an
    infinity, but for those of a causal mask that code keeps in its checkpoints, for scales of zero
    that leave nothing of a weight, and for tensors that differ where the model has one weight.
    """
    from onboard.graph.weight_load.quantised_folder import QuantisedCheckpoint, open_checkpoint
    from onboard.graph.weight_load.safetensors_folder import find_non_finite
    from onboard.graph.weight_load.weight_sources import check_alike

    checkpoint = open_checkpoint(folder)
    checkpoint.validate()
    if isinstance(checkpoint, QuantisedCheckpoint):
        checkpoint.check_scales()
    for name in checkpoint.names():
        tensor = checkpoint.read(name)
        if isinstance(checkpoint, QuantisedCheckpoint):
            checkpoint.check_values(name, tensor)
        if (found := find_non_finite(tensor)) and not _is_causal_mask(tensor):
            raise OnboardError(
                f"the weight {name} of {folder} holds {found}",
                hint="Fetch or save the checkpoint again",
            )
    for pair in tied:
        check_alike(checkpoint, *pair)


def _is_causal_mask(tensor: torch.Tensor) -> bool:
    """Whether a tensor is minus infinity above its diagonal and zero elsewhere."""
    import torch

    if tensor.dim() < 2 or tensor.shape[-1] != tensor.shape[-2]:
        return False
    mask = torch.full(tensor.shape[-2:], float("-inf"), dtype=tensor.dtype).triu(1)
    return bool((tensor == mask).all())
