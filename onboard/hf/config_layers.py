"""What the fields of a config say of single layers, and the fields of a model with only some of
them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

_COUNTS = ("num_hidden_layers", "num_layers")
_OTHER_COUNTS = ("num_blocks",)
"""Fields that, where they have the number of layers, count the same layers once more."""
_LAST_LAYERS = ("num_kv_shared_layers",)
"""Fields that say how many of the last layers are of another kind."""
_VIEWS = ("layer_types", "layers_block_type", "layers_num_experts", "kv_sharing_modes")
"""What a config derives for each layer."""
_INDICES = re.compile(r"(\w+_)?(layers?|attn)(_(indices|ids|idxs?|indexe?s))?")
"""Fields that list the indices of layers."""
_FROM_ONE = {"ple_layer_ids"}
"""Fields whose indices begin at one."""
_DENSE_LAYERS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
"""Fields that say how many of the first layers are no mixtures."""
_LETTERS = re.compile(r"\w*(pattern|layout|types)\w*")
"""Fields that may be a text with a letter for each layer."""
_TOKENS = re.compile(r"\w*token_ids?")
"""Fields that list tokens of the vocabulary, of which there may be as many as layers."""
_PERIOD = re.compile(r"\w*(interval|period|freq|pattern|every)\w*")


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
    indices = {
        name: [i - (name in _FROM_ONE) for i in value]
        for name, value in values.items()
        if _names(name, value)
    }
    return Layers(
        key=key,
        count=count,
        lists={
            name: value
            for name, value in values.items()
            if name in of_layers and name not in indices
        },
        views={name: view for name in _VIEWS if (view := _view(config, name, count))},
        indices=indices,
        firsts={name: value for name in _DENSE_LAYERS if type(value := values.get(name)) is int},
        lasts={name: value for name in _LAST_LAYERS if type(value := values.get(name)) is int},
        overrides={
            int(index): fields for index, fields in values.get("per_layer_config", {}).items()
        },
        periods=[
            value
            for name, value in values.items()
            if type(value) is int and _PERIOD.fullmatch(name)
        ],
    )


def _of_layers(
    config: PretrainedConfig, key: str, values: Mapping[str, Any], count: int
) -> set[str]:
    """Return the fields with a value for each layer, not those that have as many by chance, as the
    defaults show.
    """
    lists = {
        name
        for name, value in values.items()
        if (_is_list(value, count) and not _TOKENS.fullmatch(name))
        or _has_letters(name, value, count)
    }
    defaults = {} if getattr(config, "has_no_defaults_at_init", False) else type(config)().to_dict()
    usual = defaults.get(key)
    if type(usual) is not int or usual == count:
        return lists
    return {
        name for name in lists if not _is_sized(defaults.get(name)) or len(defaults[name]) == usual
    }


def _is_sized(value: object) -> bool:
    return isinstance(value, list | tuple | str) and len(value) > 0


def _has_letters(name: str, value: object, count: int) -> bool:
    return isinstance(value, str) and len(value) == count and bool(_LETTERS.fullmatch(name))


def _view(config: PretrainedConfig, name: str, count: int) -> Sequence[Any]:
    try:
        value = getattr(config, name, ())
    except ValueError:  # it has no meaning here: every layer reads what another model's layers made
        return ()
    return value if _is_list(value, count) else ()


def cut_layers(layers: Layers, values: dict[str, Any], kept: list[int]) -> None:
    """Leave what the fields say of the layers in `kept`."""
    if layers.key in values:  # some configs count a list's entries instead
        values[layers.key] = len(kept)
    values |= {name: len(kept) for name in _OTHER_COUNTS if values.get(name) == layers.count}
    for name in layers.lists:
        of_kept = [values[name][index] for index in kept]
        values[name] = "".join(of_kept) if isinstance(values[name], str) else of_kept
    for name, indices in layers.indices.items():
        values[name] = [new + (name in _FROM_ONE) for new, old in enumerate(kept) if old in indices]
    for name, count in layers.firsts.items():
        values[name] = sum(index < count for index in kept)
    for name, count in layers.lasts.items():
        values[name] = sum(index >= layers.count - count for index in kept)
    if layers.overrides:
        overrides = {
            new: layers.overrides[old] for new, old in enumerate(kept) if old in layers.overrides
        }
        values["per_layer_config"] = overrides


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
