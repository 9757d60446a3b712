"""Which entries are run: those of a filter, and of these the ones for which no run tells what one
would now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onboard import registry
from onboard.composition import compose
from onboard.config import suggest
from onboard.content import content_path
from onboard.errors import OnboardError, UsageError
from onboard.extensions import extensions_digest
from onboard.hub import open_source
from onboard.registry import RegistryEntry
from onboard.workflow.checkpoint.checkpoint_size import native_values
from onboard.workflow.reduced_depth import reduced_depth
from onboard.workflow.registry_results import Result
from onboard.workflow.registry_runs.expression import parse
from onboard.workflow.run_state import current_versions, hash_inputs


def chosen(
    entries: Sequence[RegistryEntry], names: Sequence[str], expression: str
) -> list[RegistryEntry]:
    """Return the entries of these names (all for none) that the expression means; raise
    `UsageError` for none.
    """
    known = {entry.name for entry in entries}
    for name in names:
        if name not in known:
            raise UsageError(
                f"{name} is not in the registry", hint=suggest(name, known, "onboard registry list")
            )
    is_meant = parse(expression)
    found = [entry for entry in entries if (not names or entry.name in names) and is_meant(entry)]
    if not found:
        raise UsageError("no entry of the registry is meant", hint="See: onboard registry list")
    return found


def key_of(
    entry: RegistryEntry,
    root: Path,
    source: str,
    device: str,
    *,
    reduced: bool,
    world_size: int | None = None,
) -> str:
    """Return the digest of everything that an entry's result depends on; `source` is the program's
    own digest, `world_size` how many ranks are asked for, if any.
    """
    inputs = {
        "config": compose(entry, root).model_dump(mode="json", exclude_unset=True),
        "model_file": registry.digest(model_file(entry, root)),
        "weights": _weights(compose(entry, root).model),
        "source": source,
        "extensions": extensions_digest(root),
        "device": device,
        "reduced": reduced,
        "world_size": world_size,
    }
    return hash_inputs(inputs, current_versions())


def model_file(entry: RegistryEntry, root: Path) -> Path:
    """Return the model file that an entry runs with."""
    return content_path("models", f"modeling_{entry.family}.py", root=root)


def row_of(
    results: Sequence[Result],
    name: str,
    device: str,
    *,
    reduced: bool,
    world_size: int | None = None,
) -> Result | None:
    """Return an entry's newest row on a device, by the ranks that were asked for."""
    wanted = name, device, reduced, world_size
    rows = [
        row
        for row in results
        if (row.name, row.device, row.layers is not None, row.world_size) == wanted
    ]
    return max(rows, key=lambda row: row.date, default=None)


def reduced_layers(entry: RegistryEntry, root: Path) -> int | None:
    """Return how many layers show every kind of layer that a config names, at least two; None for a
    config unknown.
    """
    runtime = compose(entry, root)
    try:
        values: Mapping[str, Any] = native_values(
            open_source(runtime.model, revision=runtime.revision).config()
        )
    except OnboardError:
        return None
    total, kinds = values.get("num_hidden_layers"), values.get("layer_types")
    kinds = kinds if isinstance(kinds, list) else []
    firsts = [kinds.index(kind) for kind in set(map(str, kinds))]
    return reduced_depth(firsts, total if isinstance(total, int) else max(2, len(kinds)))


def _weights(model: str) -> list[list[Any]]:
    """Return size and time of a local folder's weights; a Hub's are as its revision says."""
    path = Path(model).expanduser()
    files = sorted([*path.glob("*.safetensors"), *path.glob("*.gguf")]) if path.is_dir() else []
    files += [path] if path.is_file() else []
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
