"""Runs that have fewer devices than their configuration asks for: as many ranks as there are, where
the model fits them.
"""

from __future__ import annotations

from pathlib import Path

from onboard.config import RuntimeConfig
from onboard.errors import UsageError
from onboard.gpu import device_memory, gib
from onboard.graph.weight_load.quantised_folder import quantised_checkpoint
from onboard.hub import has_weights
from onboard.runtime.fitted_plan import fitted
from onboard.runtime.kept_plan import counted_or_kept
from onboard.runtime.ranks.division import Division
from onboard.runtime.ranks.kept_division import find_division


def fewer_ranks(
    checkpoint: Path, runtime: RuntimeConfig, gpus: int, *, root: Path, model: str
) -> Division | None:
    """Return how a model is divided among the most ranks that `gpus`, which are fewer than its
    configuration asks for, allow; None: it runs on one device.

    Raises:
        UsageError: it does not fit there.
        OnboardError: the model was not onboarded.
    """
    if runtime.mode == "transformers":  # nothing plans it
        return None
    found = _most(checkpoint, runtime, gpus, root=root, model=model)
    ranks = 1 if found is None else found.world_size
    own = runtime.model_copy(update={"world_size": ranks})
    memory = device_memory("cuda" if gpus else "cpu").total
    if not _fits(checkpoint, own, memory, gpu=gpus > 0, root=root, model=model):
        here = f"of {gpus} here each" if gpus else "none are used here, and the host"
        raise UsageError(
            f"{model or checkpoint.name} is configured for {runtime.world_size} GPUs;"
            f" {here} has {gib(memory)}, which it does not fit",
            hint=f"Use a host with {runtime.world_size}; onboard plan says what each takes",
        )
    return found


def _most(
    checkpoint: Path, runtime: RuntimeConfig, gpus: int, *, root: Path, model: str
) -> Division | None:
    """Return the division among as many ranks as there are GPUs, or as can divide the model."""
    for ranks in range(gpus, 1, -1):
        own = runtime.model_copy(update={"world_size": ranks})
        try:
            return find_division(checkpoint, own, gpu=True, root=root, model=model)
        except UsageError:  # these cannot
            continue
    return None


def _fits(
    checkpoint: Path, runtime: RuntimeConfig, memory: int, *, gpu: bool, root: Path, model: str
) -> bool:
    counted, _ = counted_or_kept(checkpoint, runtime, gpu=gpu, root=root, model=model)
    plan, _ = fitted(
        counted.sparing(_spared(checkpoint, gpu) // runtime.world_size).over(1, memory)
    )
    return plan.fits_one()


def _spared(checkpoint: Path, gpu: bool) -> int:
    """Return by how many bytes weights that stay quantised are smaller; the CPU decodes them."""
    if not gpu or not has_weights(checkpoint):
        return 0
    quantised = quantised_checkpoint(checkpoint)
    return 0 if quantised is None else quantised.spared_bytes()
