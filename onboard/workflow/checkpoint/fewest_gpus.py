"""How many GPUs a model is registered with: the fewest of one kind that hold it and can divide it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from onboard.cache.budget import MemoryPlan
from onboard.config import DType, RuntimeConfig
from onboard.errors import OnboardError
from onboard.gpu_kinds import known_gpus
from onboard.runtime.kept_plan import counted_or_kept
from onboard.workflow.checkpoint.checkpoint_size import max_positions
from onboard.workflow.checkpoint.kept_codes import spared_bytes
from onboard.workflow.checkpoint.parameter_count import build_on_meta, module_counts

GPU = "H100"
"""The kind whose memory is planned with."""
CONTEXT = 8192
"""Tokens of the one sequence that has to fit beside the weights, or all that the model takes."""
WORLD_SIZES = (1, 2, 4, 8)
"""Those that `registry/configs` has a file for: GPUs of one host."""


@dataclass(frozen=True)
class FewestGpus:
    """A world size, and why it is this one."""

    count: int
    why: str


def fewest_gpus(
    folder: Path,
    config: Mapping[str, Any],
    parameters: int,
    *,
    dtype: DType = "auto",
    root: Path,
    model: str,
) -> FewestGpus:
    """Return the world size of a checkpoint (a folder with config.json) whose model file the root
    has.

    A model that no number of GPUs holds gets the most that can divide it, and one that cannot be
    planned gets one.
    """
    memory, size = known_gpus()[GPU], _width(config, dtype) * parameters
    if 2 * size < memory:
        return FewestGpus(1, f"its weights take less than half of one {GPU}")
    spared = spared_bytes(folder)[0]
    size -= spared
    length = min(CONTEXT, max_positions(dict(config)) or CONTEXT)
    enough = [count for count in WORLD_SIZES if size < count * memory] or WORLD_SIZES[-1:]
    most, refused = 1, ""
    for count in enough:
        try:
            plan = _planned(folder, dtype, length, count, spared, root=root, model=model)
        except OnboardError as error:  # so many cannot divide it
            refused = error.message
            continue
        most = count
        if plan.fits():
            why = f"{count} x {GPU} hold it and a sequence of {length:,} tokens"
            return FewestGpus(count, why)
    return FewestGpus(most, refused or f"not even {most} x {GPU} hold it")


def parameters_of(config: Mapping[str, Any]) -> int:
    """Return how many parameters the model of a config has."""
    with config_folder(config) as folder:
        return sum(module_counts(build_on_meta(folder)).values())


@contextmanager
def config_folder(config: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a folder with this config.json alone."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield Path(folder)


def _width(config: Mapping[str, Any], dtype: DType) -> int:
    """Return the bytes of a parameter on a GPU."""
    named = str(config.get("dtype") or config.get("torch_dtype")) if dtype == "auto" else dtype
    return 4 if "float32" in named else 2


def _planned(
    folder: Path, dtype: DType, length: int, count: int, spared: int, *, root: Path, model: str
) -> MemoryPlan:
    """Return what one of so many ranks takes for one sequence; weights that stay quantised spare
    bytes.
    """
    runtime = RuntimeConfig(dtype=dtype, world_size=count, max_batch_size=1, max_seq_len=length)
    counted, _ = counted_or_kept(folder, runtime, gpu=True, root=root, model=model)
    return counted.sparing(spared // count).over(1, known_gpus()[GPU])
