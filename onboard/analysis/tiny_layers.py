"""Which layers a small model keeps: one of each kind, however the config tells them apart."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from onboard.analysis.few_experts import DENSE_LAYERS
from onboard.analysis.tiny_mixers import attends_in_blocks

_COUNTS = ("num_hidden_layers", "num_layers")
_OTHER_COUNTS = ("num_blocks",)
"""Fields that, where they have the number of layers, count the same layers once more."""
_LAST_LAYERS = ("num_kv_shared_layers",)
"""Fields that say how many of the last layers are of another kind."""
_VIEWS = ("layer_types", "layers_block_type", "kv_sharing_modes")
"""What a config derives for each layer."""
_INDICES = re.compile(r"(\w+_)?(layers?|attn)(_(indices|ids|idxs?|indexe?s))?")
"""Fields that list the indices of layers."""
_FROM_ONE = {"ple_layer_ids"}
"""Fields whose indices begin at one."""
_PERIOD = re.compile(r"\w*(interval|period|freq|pattern|every)\w*")
_MOST_LAYERS = 8


@dataclass(frozen=True)
class Layers:
    """What the fields of a config say of single layers."""

    key: str
    """The field that has the number of layers."""
    count: int
    lists: dict[str, Sequence[Any]]
    """Fields with a value for each layer."""
    views: dict[str, Sequence[Any]]
    """Derived, a value for each layer."""
    indices: dict[str, list[int]]
    """Fields that name layers, counted from zero."""
    firsts: dict[str, int]
    lasts: dict[str, int]
    overrides: dict[int, dict[str, Any]]
    """Fields that single layers have for themselves."""
    periods: list[int]


def read_layers(config: PretrainedConfig, values: Mapping[str, Any]) -> Layers | None:
    """Return what is known of the single layers; None for a config that has no layers."""
    keys = [config.attribute_map.get(name, name) for name in _COUNTS]
    key = next((key for key in keys if type(values.get(key)) is int), keys[0])
    count = values[key] if key in values else getattr(config, keys[0], None)
    if type(count) is not int:
        return None
    of_layers = _of_layers(config, key, values, count)
    indices = {name: [i - (name in _FROM_ONE) for i in value] for name, value in values.items() if _names(name, value)}
    return Layers(
        key=key,
        count=count,
        lists={name: value for name, value in values.items() if name in of_layers and name not in indices},
        views={name: view for name in _VIEWS if (view := _view(config, name, count))},
        indices=indices,
        firsts={name: value for name in DENSE_LAYERS if type(value := values.get(name)) is int},
        lasts={name: value for name in _LAST_LAYERS if type(value := values.get(name)) is int},
        overrides={int(index): fields for index, fields in values.get("per_layer_config", {}).items()},
        periods=[value for name, value in values.items() if type(value) is int and _PERIOD.fullmatch(name)],
    )


def _of_layers(config: PretrainedConfig, key: str, values: Mapping[str, Any], count: int) -> set[str]:
    """Return the fields with a value for each layer, not those that have as many by chance, as the defaults show."""
    lists = {name for name, value in values.items() if _is_list(value, count)}
    defaults = {} if getattr(config, "has_no_defaults_at_init", False) else type(config)().to_dict()
    usual = defaults.get(key)
    if type(usual) is not int or usual == count:
        return lists
    return {name for name in lists if not _is_sized(defaults.get(name)) or len(defaults[name]) == usual}


def _is_sized(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0


def _view(config: PretrainedConfig, name: str, count: int) -> Sequence[Any]:
    try:
        value = getattr(config, name, ())
    except ValueError:  # it has no meaning here: every layer reads what another model's layers made
        return ()
    return value if _is_list(value, count) else ()


def kinds(layers: Layers) -> list[str]:
    """Return what tells each layer from others."""
    return [_kind(layers, index) for index in range(layers.count)]


def first_of_each_kind(layers: Layers, values: Mapping[str, Any]) -> list[int]:
    """Return the layers to keep: the first of each kind, at least two.

    Blocks of hybrid layers may be shared by all such layers, in turn where there are several: one more is kept. Where
    linear attention forgets less the deeper it lies, the last layer forgets nothing: two of each kind are kept.
    """
    seen: dict[str, list[int]] = {}
    for index, kind in enumerate(kinds(layers)):
        seen.setdefault(kind, []).append(index)
    shared, others = 1 + values.get("num_mem_blocks", 1), 2 if attends_in_blocks(values) else 1
    kept = sorted(i for kind, of_kind in seen.items() for i in of_kind[: shared if "'hybrid'" in kind else others])
    return kept if len(kept) > 1 else prefix(layers)


def prefix(layers: Layers, shortest: int = 2) -> list[int]:
    """Return layers from the first on, until a period is over."""
    return list(range(min(layers.count, max(shortest, *layers.periods, 2), max(shortest, _MOST_LAYERS))))


def cut_layers(layers: Layers, values: dict[str, Any], kept: list[int]) -> None:
    """Leave what the fields say of the layers in `kept`."""
    if layers.key in values:  # some configs count a list's entries instead
        values[layers.key] = len(kept)
    values |= {name: len(kept) for name in _OTHER_COUNTS if values.get(name) == layers.count}
    for name in layers.lists:
        values[name] = [values[name][index] for index in kept]
    for name, indices in layers.indices.items():
        values[name] = [new + (name in _FROM_ONE) for new, old in enumerate(kept) if old in indices]
    for name, count in layers.firsts.items():
        values[name] = sum(index < count for index in kept)
    for name, count in layers.lasts.items():
        values[name] = sum(index >= layers.count - count for index in kept)


def _kind(layers: Layers, index: int) -> str:
    listed = [value[index] for value in (*layers.lists.values(), *layers.views.values())]
    named = [index in indices for indices in layers.indices.values()]
    firsts = [index < count for count in layers.firsts.values()]
    lasts = [index >= layers.count - count for count in layers.lasts.values()]
    return repr([listed, named, firsts, lasts, layers.overrides.get(index)])


def _is_list(value: object, length: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == length


def _names(name: str, value: object) -> bool:
    """Whether a field lists layers: their indices, in order."""
    return (
        _INDICES.fullmatch(name) is not None
        and isinstance(value, list | tuple)
        and all(type(item) is int for item in value)
        and sorted(set(value)) == list(value)
        and len(value) > 0
    )
