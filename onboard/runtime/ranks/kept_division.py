"""How ranks divide a model, found once for a config and a configuration; read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onboard.config import RuntimeConfig
from onboard.graph.sharding.distribution import check_stages, distribution
from onboard.runtime.kept_document import KeptDocument
from onboard.runtime.ranks.division import Division


def find_division(
    checkpoint: Path, runtime: RuntimeConfig, *, gpu: bool, root: Path, model: str = ""
) -> Division:
    """Return how `runtime.world_size` ranks divide a checkpoint (a folder with config.json), from
    the user's cache if it was found before.

    Raises:
        IndivisibleError: the ranks cannot divide heads; it has the world sizes that can.
        UsageError: a `dist_mapping` that does not fit.
        OnboardError: the model was not onboarded.
    """
    groups = distribution(runtime.world_size, runtime.dist_mapping)  # refused at once
    if groups.stages > 1:
        check_stages(runtime)
    kept = KeptDocument(checkpoint, runtime, gpu=gpu, root=root, folder="divisions")
    if (document := kept.read()) is not None:
        return _read(document["division"])
    from onboard.runtime.ranks.rehearsed_division import rehearsed

    found = rehearsed(checkpoint, runtime, gpu=gpu, root=root, model=model)
    kept.write({"division": asdict(found)})
    return found


def _read(values: Mapping[str, Any]) -> Division:
    stages = tuple((layers, size) for layers, size in values["stages"])
    return Division(**{**values, "stages": stages, "facts": tuple(values["facts"])})
