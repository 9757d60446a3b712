"""Writing what tuning found to a model's configuration file, with the figures as comments."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from io import StringIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from ruamel.yaml import YAML

from onboard.bench.tuning.tune import Trial, Tuning
from onboard.errors import UsageError
from onboard.registry import config_path, find_entry, load_standalone

MARK = "# tuned: "
"""How the lines begin that tuning writes, and takes away again the next time."""


def config_file(model: str, root: Path, config: Path | None) -> Path:
    """Return the file that the model's configuration is kept in: the one given, else the registered
    one.

    Raises `UsageError` when there is neither.
    """
    if config is not None:
        return config
    entry = find_entry(model, root)
    if entry is None:
        raise UsageError(
            f"{model} is not registered under {root}",
            hint="Onboard it there, or name a configuration with --config",
        )
    return config_path(root, entry.config_id)


def write(path: Path, tuning: Tuning, device: str, date: str) -> None:
    """Merge the changes into the file, other lines stay; the result is validated before anything is
    written.
    """
    text = path.read_text("utf-8") if path.is_file() else ""
    lines = [line for line in text.splitlines() if not line.startswith(MARK)]
    new = _merged_text("\n".join(lines) + "\n" * bool(lines), tuning.changes)
    new += "".join(f"{MARK}{line}\n" for line in evidence(tuning, device, date))
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(
        "w", dir=path.parent, suffix=".yaml", delete=False, encoding="utf-8"
    ) as file:
        file.write(new)
    try:
        load_standalone(Path(file.name))
        os.replace(file.name, path)
    finally:
        Path(file.name).unlink(missing_ok=True)


def evidence(tuning: Tuning, device: str, date: str) -> Iterable[str]:
    """Yield lines that say what was measured, and what became of each choice."""
    yield f"on {device}, {date}; times in ms, errors of logits against the plain graph"
    for trial in tuning.trials:
        yield f"{_name(trial)}: {_times(trial)}{_verdict(trial)}"
    if tuning.buckets:
        yield "decode step by batch size: " + ", ".join(
            f"{n}: {ms:.3f}" for n, ms in sorted(tuning.buckets.items())
        )


def _name(trial: Trial) -> str:
    return f"{trial.knob} {trial.value}".strip()


def _times(trial: Trial) -> str:
    if not trial.milliseconds:
        return ""
    times = "; ".join(f"{name} {ms:.3f}" for name, ms in trial.milliseconds.items())
    return f"{times}; error {trial.error:.1e}; "


def _verdict(trial: Trial) -> str:
    return "kept" if trial.kept else trial.reason


def _merged_text(text: str, changes: Mapping[str, Any]) -> str:
    yaml = YAML()
    yaml.width = 4096
    values = yaml.load(text) or {}
    _merge(values, changes)
    stream = StringIO()
    yaml.dump(values, stream)
    return stream.getvalue() if values else text


def _merge(values: Any, changes: Mapping[str, Any]) -> None:
    """Merge in place, so that comments and the order of what is there stay."""
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(values.get(key), Mapping):
            _merge(values[key], value)
        else:
            values[key] = value
