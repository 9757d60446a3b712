"""What a model's name stands for: its configuration and the folder that holds its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from onboard.config import RuntimeConfig
from onboard.content import content_path
from onboard.errors import UsageError
from onboard.graph.quantised import refuse_quantised
from onboard.hub import open_source
from onboard.registry import config_path, find_entry

ConfigLike = str | Path | Mapping[str, Any] | RuntimeConfig | None


def resolve_config(
    model: str, root: Path, config: ConfigLike = None, overrides: Mapping[str, Any] | None = None
) -> RuntimeConfig:
    """Return the configuration to run `model` with: the given one, else the registered one, else the defaults.

    `overrides` replace its fields, except where they say no more than the defaults do.
    """
    if isinstance(config, RuntimeConfig):
        values = config.model_dump(exclude_unset=True)
    elif isinstance(config, Mapping):
        values = dict(config)
    else:
        entry = find_entry(model, root) if config is None else None
        path = config_path(root, entry.config_id) if entry else config
        values = _read_yaml(Path(path)) if path is not None else {}
    fields = RuntimeConfig.model_fields
    changed = {key: value for key, value in (overrides or {}).items() if value != fields[key].default}
    return _validated({**values, "model": values.get("model") or model, **changed})


def doubt(model: str, root: Path, family: str) -> str | None:
    """Return why the registry does not vouch for a model of its own; None when it does, or does not know it."""
    entry = find_entry(model, root)
    return entry.doubt(content_path("models", f"modeling_{family}.py", root=root)) if entry else None


def find_checkpoint(runtime: RuntimeConfig) -> Path:
    """Return the folder with the model's files, weights among them unless they are random anyway.

    Raises `OnboardError`, before weights are fetched, where a generated model could not read them.
    """
    source = open_source(runtime.model, revision=runtime.revision)
    if runtime.mode == "graph" and not runtime.skip_loading_weights:
        refuse_quantised(source.config(), source.files(), {})
    return source.files() if runtime.skip_loading_weights else source.weights()


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"the configuration {path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"the configuration {path} is not a mapping")
    return values


def _validated(values: dict[str, Any]) -> RuntimeConfig:
    try:
        return RuntimeConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"the configuration's {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
