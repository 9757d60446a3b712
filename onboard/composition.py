"""What a registry entry runs with: its configs of `registry/configs`, deep-merged in order.

The standalone config says everything once more, so that it can be used alone. Between the others it
counts for what it has of its own: a value that is the default of `RuntimeConfig` is taken for a
repetition, and a fragment's stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onboard.config import RuntimeConfig, deep_merge
from onboard.registry import RegistryEntry, config_file, read_config_file, validated


@dataclass(frozen=True)
class Layer:
    """One file of a composition, and what it says there."""

    name: str
    values: dict[str, Any]


def compose(entry: RegistryEntry, root: Path) -> RuntimeConfig:
    """Return what an entry runs with; raise `OnboardError` when its files do not make a
    configuration.
    """
    return validated(merge(layers(entry, root)), f"the registry entry {entry.name}")


def layers(entry: RegistryEntry, root: Path) -> list[Layer]:
    """Return the files of an entry in order; the standalone config comes last where the entry does
    not name it.
    """
    names = [
        *entry.yaml_extra,
        *([entry.standalone] if entry.standalone not in entry.yaml_extra else []),
    ]
    read = {name: read_config_file(config_file(name, root)) for name in names}
    return [
        Layer(name, own(read[name]) if name == entry.standalone else read[name]) for name in names
    ]


def compose_config(names: Sequence[str], root: Path) -> RuntimeConfig:
    """Return what shared files of `configs/` come to, the root's own before the shipped ones."""
    found = [Layer(name, read_config_file(config_file(name, root))) for name in names]
    return validated(merge(found), ", ".join(names))


def merge(found: Sequence[Layer]) -> dict[str, Any]:
    """Deep-merge in order."""
    merged: dict[str, Any] = {}
    for layer in found:
        merged = deep_merge(merged, layer.values)
    return merged


def own(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what differs from the defaults of `RuntimeConfig`."""
    return _departures(values, RuntimeConfig().model_dump(mode="json"))


def origins(found: Sequence[Layer]) -> dict[str, str]:
    """Return the file that each value comes from: "kv_cache_config.max_tokens" ->
    "small_cache.yaml".
    """
    where: dict[str, str] = {}
    for layer in found:
        for key in _leaves(layer.values):
            where = {
                name: file
                for name, file in where.items()
                if not _covers(key, name) and not _covers(name, key)
            }
            where[key] = layer.name
    return where


def without_effect(found: Sequence[Layer]) -> list[str]:
    """Return the files that change nothing, as later ones say something else of all that they
    say.
    """
    heard = set(origins(found).values())
    return [layer.name for layer in found if layer.values and layer.name not in heard]


def _departures(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            value = _departures(value, default)
            if value:
                out[key] = value
        elif key not in defaults or value != default:
            out[key] = value
    return out


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _covers(key: str, name: str) -> bool:
    return name == key or name.startswith(f"{key}.")
