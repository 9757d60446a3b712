"""Resolves a model's name to its configuration and to the folder with its files.

Every run of a registered model gets its configuration here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from onboard.composition import compose
from onboard.config import RuntimeConfig
from onboard.errors import UsageError
from onboard.hub import open_source
from onboard.registry import find_entry

ConfigLike = str | Path | Mapping[str, Any] | RuntimeConfig | None


def resolve_config(
    model: str, root: Path, config: ConfigLike = None, overrides: Mapping[str, Any] | None = None
) -> RuntimeConfig:
    """Return the configuration to run `model` with: `config`, else that of its registry entry, else
    the defaults.

    `overrides` are the user's settings and win; among them None, "auto" and other defaults count as
    not set. Raises `UsageError` or `OnboardError`.
    """
    if isinstance(config, RuntimeConfig):
        values = config.model_dump(exclude_unset=True)
    elif isinstance(config, Mapping):
        values = dict(config)
    else:
        values = _registered(model, root) if config is None else _read_yaml(Path(config))
    changed = {key: value for key, value in (overrides or {}).items() if _says(key, value)}
    return _validated({**values, "model": values.get("model") or model, **changed})


def _registered(model: str, root: Path) -> dict[str, Any]:
    entry = find_entry(model, root)
    return (
        {}
        if entry is None
        else {"model": entry.name, **compose(entry, root).model_dump(exclude_unset=True)}
    )


def _says(key: str, value: Any) -> bool:
    """Whether an override was set by the user: numbers always are."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number or (value is not None and value != RuntimeConfig.model_fields[key].default)


def find_checkpoint(runtime: RuntimeConfig) -> Path:
    """Return the folder with the model's files, including weights unless these are random.

    Raises `OnboardError`, before weights are fetched, where a generated model could not read them.
    """
    from onboard.quantised.read_method import read_method

    source = open_source(runtime.model, revision=runtime.revision)
    if runtime.mode == "graph" and not runtime.skip_loading_weights:
        read_method(source.config(), source.files())
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
        raise UsageError(
            f"the configuration's {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from error
