"""Everything that `onboard explain` shows, as one document: nothing is measured for it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from onboard.cache.resources import CacheResource
from onboard.config import RuntimeConfig
from onboard.content import content_path
from onboard.errors import OnboardError, UsageError
from onboard.explain.explained_layers import layers, outside
from onboard.explain.graph_changes import changes, chosen_profile, kernel_rows, not_applied
from onboard.explain.read_bytes import ReadWeights, cache_bytes
from onboard.gpu_kinds import read_bandwidth
from onboard.graph.weight_load.quantised_folder import QuantisedCheckpoint, open_checkpoint
from onboard.graph.weight_load.safetensors_folder import Checkpoint
from onboard.runtime.kept_plan import counted_or_kept
from onboard.runtime.resolve import resolve_config
from onboard.workflow.checkpoint.checkpoint_size import max_positions
from onboard.workflow.phase import RunContext, RunOptions
from onboard.workflow.phase_runner import open_run
from onboard.workflow.reporting.report_view import found_artifacts

CONTEXT = 1024
"""Tokens of a sequence for which caches are counted, where nobody says how many."""
NO_PROFILE = "no profile of a GPU was taken. On a machine with one: {command}"


@dataclass
class Records:
    """What is on record of an onboarded model."""

    context: RunContext
    runtime: RuntimeConfig
    found: dict[str, dict[str, Any]]
    bench: dict[str, Any]

    @classmethod
    def of(cls, model: str, root: Path) -> Records:
        """Return the records of a model; raise `UsageError` where it was not onboarded under
        `root`.
        """
        runtime = resolve_config(model, root, None, {})
        context = open_run(runtime.model, root, RunOptions())
        if not context.artifact("spec.yaml").is_file():
            raise UsageError(
                f"{model} was not onboarded under {context.root}",
                hint=f"Run: onboard {model} --root {root}",
            )
        path = context.work_dir / "bench" / "bench.json"
        bench = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return cls(context, runtime, found_artifacts(context), bench)

    @property
    def full(self) -> dict[str, Any]:
        """The full run."""
        full: dict[str, Any] = self.found["run"].get("runs", {}).get("full", {})
        return full

    @property
    def model_file(self) -> str:
        """The model file's path below a root."""
        return f"models/modeling_{self.context.spec.family}.py"

    @cached_property
    def model_text(self) -> str:
        """The model file's text; "" where there is none yet."""
        path = content_path(*self.model_file.split("/"), root=self.context.root)
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    @property
    def dtype(self) -> str:
        """The dtype in which a GPU would run the model: what the config says, else bfloat16."""
        config = self.context.spec.config
        said = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        return self.runtime.dtype if self.runtime.dtype != "auto" else said

    @cached_property
    def read(self) -> ReadWeights | None:
        """What weights a token reads; None where no checkpoint's headers are here."""
        try:
            checkpoint = open_checkpoint(self.context.source.files())
            shapes = {name: meta.shape for name, meta in checkpoint.names().items()}
        except OnboardError:
            return None
        itemsize = getattr(torch, self.dtype, torch.bfloat16).itemsize
        return ReadWeights(self.context.spec, shapes, itemsize, stored(checkpoint))

    def resources(self) -> tuple[CacheResource, ...]:
        """Return the caches that the memory plan has for a GPU."""
        plan, _ = counted_or_kept(
            self.context.source.files(),
            self.runtime.model_copy(update={"dtype": self.dtype}),
            gpu=True,
            root=self.context.root,
            model=self.context.model,
            decides=lambda _: True,
        )
        return plan.cache.resources


def stored(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the bytes of quantised weights in the files."""
    if not isinstance(checkpoint, QuantisedCheckpoint):
        return {}
    sizes = checkpoint.files.names()
    return {
        name: sum(sizes[part].nbytes for part in weight.parts.values())
        for name, weight in checkpoint.weights.items()
    }


def explanation(model: str, root: Path, gpu: str | None, context: int | None) -> dict[str, Any]:
    """Return what is known of a model, as JSON-able data.

    Args:
        model: a folder, an id or a registered name.
        root: where it was onboarded.
        gpu: the kind of GPU for the floor; None: that of the record of `onboard bench`.
        context: tokens of a sequence for the floor; None: `CONTEXT`, or as many as the model has.

    Raises:
        OnboardError: the model was not onboarded there.
        UsageError: the GPU is not known.
    """
    bandwidth = read_bandwidth(gpu) if gpu is not None else None
    records = Records.of(model, root.expanduser())
    spec, full = records.context.spec, records.full
    profile = chosen_profile(records.bench)
    tests = records.found["tests"]
    kinds = layers(spec, records.model_text, tests, records.read)
    command = shlex.join(["onboard", "bench", model, "--root", str(root), "--profile"])
    return {
        "model": model,
        "architecture": spec.architecture,
        "source": spec.hf_module,
        "model_file": records.model_file,
        "dtype": records.dtype,
        "layers": kinds,
        "outside": outside(spec, records.model_text, tests),
        "settings": full.get("settings", {}),
        "transforms": changes(full, profile),
        "not_applied": not_applied(full),
        "facts": full.get("facts", []),
        "profile": profile and {**profile, "totals": kernel_rows(full, profile)},
        "profile_missing": "" if profile else NO_PROFILE.format(command=command),
        "floor": _floor(records, kinds, gpu, bandwidth, context),
        "measured": _measured(records.bench),
    }


def _floor(
    records: Records,
    kinds: list[dict[str, Any]],
    gpu: str | None,
    bandwidth: float | None,
    context: int | None,
) -> dict[str, Any]:
    """Return the bytes that a token reads and the microseconds for them, or why they are not
    known.
    """
    read = records.read
    inside = sum(kind["bytes"] * kind["count"] for kind in kinds if kind["bytes"] is not None)
    if read is None or not inside:
        return {"unknown": "the checkpoint's weights are not here, or under other names"}
    weights = inside + sum(read.outside_layers().values())
    most = max_positions(records.context.spec.config) or CONTEXT
    length = context or min(CONTEXT, most)
    caches = cache_bytes(records.resources(), length)
    hardware = records.bench.get("hardware", {})
    basis = "the maker's data sheet"
    if bandwidth is None and records.bench.get("device_type") == "cuda":
        gpu, bandwidth = hardware["device"], hardware["read_bandwidth"]
        basis = "measured by onboard bench"
    total = weights + caches
    return {
        "gpu": gpu,
        "bandwidth": bandwidth,
        "basis": basis if bandwidth else "",
        "context": length,
        "weights_bytes": round(weights),
        "cache_bytes": round(caches),
        "microseconds": 1e6 * total / bandwidth if bandwidth else None,
    }


def _measured(bench: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the decode steps of the record of `onboard bench`, beside the floor of that machine."""
    return [
        {
            "device": bench["hardware"]["device"],
            "batch": each["max_concurrency"],
            "context": each["input_len"],
            "decode_step_us": 1e3 * each["decode_step_ms"],
            "floor_us": 1e3 * each["floor"]["decode_step_ms"],
        }
        for each in bench.get("results", [])
        if each.get("fits")
    ]
