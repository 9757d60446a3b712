"""The other models that a model's file serves: those of its architecture and model type, as their
configs say.

A name tells nothing: `Qwen3-0.6B` and `Qwen3-30B-A3B` are different architectures, a distillation
of one publisher may be of another's. Of a Hub's models the most downloaded one of each size is
taken for the family's, once its own config.json has confirmed what the listing says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onboard import registry
from onboard.composition import compose
from onboard.errors import OnboardError
from onboard.hub import HubSource, open_source, read_config
from onboard.quantised.said import describe_config

MOST_MEMBERS = 12
_MOST_LISTED = 200
_FAMILY = re.compile(r"\W")


def family_name(model_type: str) -> str:
    """Return the model type as the identifier that names the family's files."""
    return _FAMILY.sub("_", model_type).lower()


@dataclass(frozen=True)
class Kind:
    """What models that share a file have in common."""

    architecture: str
    family: str

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Kind:
        """Return the kind that a parsed config.json names; without `architectures` its model type
        alone.
        """
        names = config.get("architectures")
        first = names[0] if isinstance(names, list) and names else ""
        return cls(str(first), family_name(str(config.get("model_type", ""))))

    def is_same(self, other: Kind) -> bool:
        """Whether both have one file; an architecture that a config does not name is its model
        type's.
        """
        known = self.architecture and other.architecture
        return self.family == other.family and (
            not known or self.architecture == other.architecture
        )


def registered(kind: Kind, root: Path, model: str) -> list[str]:
    """Return the names of the root's other entries of this kind."""
    own = registry.find_entry(model, root)
    entries = [
        entry for entry in registry.load_entries(root) if own is None or entry.name != own.name
    ]
    return sorted(
        entry.name
        for entry in entries
        if (found := kind_of_entry(entry, root)) and kind.is_same(found)
    )


def kind_of_entry(entry: registry.RegistryEntry, root: Path) -> Kind | None:
    """Return what an entry says it is, or else its checkpoint's config where that is on this
    machine.
    """
    if entry.family:
        return Kind(entry.architecture or "", entry.family)
    config = config_of_entry(entry, root)
    return Kind.of_config(config) if config is not None else None


def config_of_entry(entry: registry.RegistryEntry, root: Path) -> Mapping[str, Any] | None:
    """Return the config.json of an entry's checkpoint where that is on this machine."""
    try:
        return open_source(compose(entry, root).model or entry.name, offline=True).config()
    except OnboardError:
        return None


def configs_here(names: Sequence[str], root: Path) -> dict[str, Mapping[str, Any]]:
    """Return the configs of the root's entries of these names whose checkpoints are on this
    machine.
    """
    entries = [entry for entry in registry.load_entries(root) if entry.name in names]
    found = ((entry.name, config_of_entry(entry, root)) for entry in entries)
    return {name: config for name, config in found if config is not None}


def on_the_hub(source: Any, kind: Kind) -> tuple[list[dict[str, Any]], str]:
    """Return name, config and size of the owner's other models of this kind, one a size; or why
    there are none.
    """
    if not isinstance(source, HubSource) or "/" not in source.model:
        return [], "a local folder has no listed relatives"
    if source.offline:
        return [], "offline: the Hub was not asked for relatives"
    from huggingface_hub.errors import HTTPError

    try:
        return list(_confirmed(source.model, kind)), ""
    except (OSError, ValueError, HTTPError) as error:
        return [], f"the Hub could not list relatives ({str(error).splitlines()[0]})"


def differences(
    own: Mapping[str, Any], other: Mapping[str, Any]
) -> dict[str, list[bool | str | None]]:
    """Return the words and switches of two configs that differ, with both values: what is not a
    matter of size.
    """
    ours, theirs = _words(own), _words(other)
    keys = sorted(key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key))
    return {key: [ours.get(key), theirs.get(key)] for key in keys}


_SAYS_NOTHING = {"dtype", "torch_dtype", "transformers_version", "use_cache", "model_type"}


def _words(config: Mapping[str, Any], prefix: str = "") -> dict[str, bool | str]:
    """Return the words and switches of a config and of the mappings in it (of the rotary table), by
    dotted key.
    """
    found: dict[str, bool | str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= _words(value, f"{prefix}{key}.")
        elif isinstance(value, bool | str) and key[:1] != "_" and key not in _SAYS_NOTHING:
            found[f"{prefix}{key}"] = value
    return found


def _confirmed(model: str, kind: Kind) -> Iterator[dict[str, Any]]:
    from huggingface_hub import hf_hub_download

    for name, parameters in _one_of_each_size(model, kind)[:MOST_MEMBERS]:
        try:
            config = read_config(Path(hf_hub_download(name, "config.json")).parent)
        except (
            OSError,
            OnboardError,
        ):  # gated, or not in this format: its owner's listing is no proof
            continue
        if kind.is_same(Kind.of_config(config)) and describe_config(config) is None:
            yield {"name": name, "config": config, "parameters": parameters}


def _one_of_each_size(model: str, kind: Kind) -> list[tuple[str, int | None]]:
    """Return the owner's most downloaded model of each size, with its parameters; the model's own
    size is taken.
    """
    from huggingface_hub import list_models

    owner = model.split("/", 1)[0]
    expand: Any = ["config", "safetensors"]
    listed = list_models(
        author=owner, filter=kind.family, sort="downloads", expand=expand, limit=_MOST_LISTED
    )
    infos = [info for info in listed if kind.is_same(Kind.of_config(info.config or {}))]
    infos = [info for info in infos if describe_config(info.config or {}) is None]
    chosen = {
        _size(info): (info.id, info.safetensors.total if info.safetensors else None)
        for info in reversed(infos)
    }
    taken = {_size(info) for info in infos if info.id == model}
    return [found for size, found in reversed(chosen.items()) if size not in taken]


def _size(info: Any) -> str:
    """Return two digits of the parameters: base and tuned models differ in a few rows of a
    table.
    """
    return f"{info.safetensors.total:.1e}" if info.safetensors else str(info.id)
