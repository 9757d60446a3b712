"""One way to read a field of a config that may have no value for all layers."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


def config_field(config: Any, name: str, otherwise: Any = None) -> Any:
    """Return a field of a config; `otherwise` where it has none, or none for all layers.

    transformers refuses, with an error of its own, to read a field that differs from layer to
    layer; a property of a repository's config may fail with any.
    """
    try:
        return getattr(config, name, otherwise)
    except Exception:
        return otherwise


def values_of(config: PretrainedConfig, different: bool = False) -> dict[str, Any]:
    """Return a config's values, or those that are no defaults; of parts that its class does not
    declare, or whose classes refuse what every config has, their own alone.
    """
    parts = {
        name: part
        for name in vars(config).keys() - getattr(config, "sub_configs", {}).keys()
        if isinstance(part := config_field(config, name), PretrainedConfig)
    }
    values: dict[str, Any] = config.to_diff_dict() if different else config.to_dict()
    values |= {name: own_values(part.to_dict()) for name, part in parts.items()}
    return _values_taken(config, values)


def own_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return a config's values without those that every config has by itself."""
    every = PretrainedConfig().to_dict()
    return {key: value for key, value in values.items() if every.get(key, values) != value}


def remade(config: PretrainedConfig, values: dict[str, Any]) -> PretrainedConfig:
    """Return a config of the same class."""
    return type(config).from_dict(_values_taken(config, values))


def _values_taken(config: PretrainedConfig, values: dict[str, Any]) -> dict[str, Any]:
    """Return those of the values that the config's class takes: some constructors, of configs
    inside it too, refuse what they do not know.
    """
    try:
        type(config).from_dict(values)
    except (TypeError, ValueError):
        parts = ((name, values.get(name)) for name in config.sub_configs)
        inside = {name: own_values(part) for name, part in parts if isinstance(part, dict)}
        for part in inside.values():
            part.pop("dtype", None)  # that of the whole
        return own_values(values) | inside
    return values
