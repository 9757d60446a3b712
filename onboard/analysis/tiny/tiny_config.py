"""The config of a tiny model: sizes shrink by field name; what makes layers differ stays."""

from __future__ import annotations

import ast
import linecache
import re
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig

from onboard.analysis.multimodal import builds, small_composites
from onboard.analysis.repository_source import PACKAGE
from onboard.analysis.source import find_method
from onboard.analysis.tiny.tiny_layers import first_of_each_kind, prefix
from onboard.analysis.tiny.tiny_sizes import (
    VOCABULARY,
    keep_heads,
    rotated_dim,
    shrink_overrides,
    shrink_rope,
    shrink_sizes,
)
from onboard.errors import OnboardError
from onboard.hf.architecture import find_language_model, is_composite
from onboard.hf.config_field import config_field, own_values, remade, values_of
from onboard.hf.config_layers import Layers, cut_layers, read_layers
from onboard.hf.hf_model import said_by, unquantised

_OF_THE_HUB = ("transformers.utils.hub", "huggingface_hub")
_SECTIONS = [16, 24, 24]
"""Of time, height and width, in the ratio that Qwen2-VL has (arXiv:2409.12191)."""

KEPT_SIZES: dict[type, frozenset[str]] = {}
"""Config class -> fields that small configs of it keep: code has their numbers as literals."""
KEPT_HEADS: dict[type, dict[str, bool]] = {}
"""What small configs keep of the checkpoint's heads, by the class of the config, where models run
with that alone: `size`, `number`.
"""
KEPT_LAYERS: dict[type, int] = {}
"""How many layers small configs of a class have at least."""
WAYS_TO_KEEP = [
    {"size": size, "number": number}
    for size, number in ((True, False), (False, True), (True, True))
]


def tiny_config(config: PretrainedConfig, *, layers: int = 0) -> PretrainedConfig:
    """Return a small config with every kind of layer that `config` has, and with `layers` of them
    if it has so many; configs inside it are made small, too, and nothing is quantised.

    Raises:
        OnboardError: the config's class refuses the small sizes.
    """
    config = unquantised(config)
    try:
        if not is_composite(config) or (model_class := find_language_model(config)) is None:
            return _shrink(config, layers)
        shrink = partial(_shrink, shortest=layers)
        small = list(small_composites(config, shrink, VOCABULARY))
        return next((item for item in small if builds(model_class, item)), small[-1])
    except Exception as error:
        raise OnboardError(
            f"cannot shrink the {config.model_type} config: {one_line(error)}"
        ) from error


def one_line(error: BaseException) -> str:
    """Return an exception as one line of text, and where in a repository's own code it comes from."""
    reason = " ".join(f"{type(error).__name__}: {said_by(error)}".split())[:300].removesuffix(":")
    place = own_place(error)
    return f"{reason}, at {place}" if place else reason


def of_its_time(version: object) -> str:
    """Return what to do with a repository's own code that fails; `version` is the transformers that
    its config names, or None.
    """
    then = f"transformers {version}" if isinstance(version, str) else "the transformers of its time"
    return f"See whether it runs with {then}, and bring a copy up to date: {transformers.__version__} is here"


def own_place(error: BaseException) -> str:
    """Return `file.py:12` of the innermost line of a repository's own code; "" for none."""
    own = [
        f"{Path(frame.f_code.co_filename).name}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith(f"{PACKAGE}.")
    ]
    return own[-1] if own else ""


def asks_hub(error: BaseException) -> bool:
    """Whether a repository's own code asked for files by a name that is looked up in the Hub: those of a
    tokenizer, say.
    """
    modules = [
        str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    asked = any(module.startswith(_OF_THE_HUB) for module in modules)
    return asked and isinstance(error, OSError) and bool(own_place(error))


def is_own_check(error: BaseException) -> bool:
    """Whether a statement of a repository's own code raises an error, and says why."""
    *_, (frame, line) = [(None, 0), *traceback.walk_tb(error.__traceback__)]
    if frame is None or not str(frame.f_globals.get("__name__")).startswith(f"{PACKAGE}."):
        return False
    text = linecache.getline(frame.f_code.co_filename, line)
    return bool(str(error) and re.search(r"\b(raise|assert)\b", text))


def _shrink(config: PretrainedConfig, shortest: int = 0) -> PretrainedConfig:
    shortest = max(shortest, KEPT_LAYERS.get(type(config), 0))
    full = config.to_dict()
    values = dict(full)
    shrink_sizes(values, full, config.attribute_map)
    values |= {name: full[name] for name in KEPT_SIZES.get(type(config), ()) if name in full}
    if type(config) in KEPT_HEADS:
        keep_heads(values, full, config.attribute_map, **KEPT_HEADS[type(config)])
    values |= {
        name: _shrink(part, shortest).to_dict()
        for name in config.sub_configs
        if (part := _part(config, name))
    }
    values |= {
        name: own_values(_shrink(part, shortest).to_dict())
        for name in vars(config).keys() - config.sub_configs.keys()
        if (part := _part(config, name))
    }
    left_out = _passed_on(config) | _worked_out(config)
    values = {name: value for name, value in values.items() if name not in left_out}
    values = shrink_rope(_with_sections(config, values), rotated_dim(values))
    layers = read_layers(config, full)
    if layers is None:
        return remade(config, values)
    kept = first_of_each_kind(layers, full)
    if len(kept) < shortest:
        kept = sorted({*kept, *range(min(shortest, layers.count))})
    try:
        beginning = prefix(layers, kept[-1] + 1)
        ways = [kept, beginning, *(list(range(n)) for n in range(len(kept) + 1, layers.count + 1))]
        made = (_cut(config, values, full, layers, way) for way in ways)
        fitting = next((small for small in made if _has_all_kinds(small, layers)), None)
        return fitting or _cut(config, values, full, layers, beginning)
    except (AssertionError, TypeError, ValueError):  # the class counts in a way of its own
        return _cut(config, values, full, layers, [*range(layers.count)])


def _with_sections(config: PretrainedConfig, values: dict[str, Any]) -> dict[str, Any]:
    """Write out how RoPE shares channels out to several axes where the config leaves it to the
    model's own default.
    """
    rope = values.get("rope_parameters")
    if "mrope_section" not in getattr(
        config, "ignore_keys_at_rope_validation", ()
    ) or not isinstance(rope, dict):
        return values
    return (
        values | {"rope_parameters": {"mrope_section": _SECTIONS} | rope}
        if "rope_type" in rope
        else values
    )


def _passed_on(config: PretrainedConfig) -> set[str]:
    """Return what a config's constructor tells its base under that name, and takes under another
    one.
    """
    found = find_method(type(config), "__init__")
    if found is None:
        return set()
    calls = [node for node in ast.walk(found[1]) if isinstance(node, ast.Call)]
    told = {
        item.arg
        for call in calls
        if ast.unparse(call.func) == "super().__init__"
        for item in call.keywords
        if item.arg
    }
    return told - {item.arg for item in (*found[1].args.args, *found[1].args.kwonlyargs)}


def _worked_out(config: PretrainedConfig) -> set[str]:
    """Return the numbers that the constructor of a repository's config computes of its arguments,
    and does not take: each made small by itself, such sizes would not fit together.
    """
    found = find_method(type(config), "__init__")
    if found is None or not found[0].__module__.startswith(f"{PACKAGE}."):
        return set()
    taken = {item.arg for item in (*found[1].args.args, *found[1].args.kwonlyargs)}
    return {
        target.attr
        for node in ast.walk(found[1])
        if isinstance(node, ast.Assign)
        and any(isinstance(x, ast.BinOp) for x in ast.walk(node.value))
        for target in node.targets
        if isinstance(target, ast.Attribute)
        and target.attr not in taken
        and isinstance(getattr(config, target.attr, None), int | float)
    }


def arguments_of(config: PretrainedConfig, different: bool = False) -> dict[str, Any]:
    """Return a config's values that its class makes one of; `different`: without defaults."""
    told = _passed_on(config)
    return {key: value for key, value in values_of(config, different).items() if key not in told}


def _part(config: PretrainedConfig, name: str) -> PretrainedConfig | None:
    part = config_field(config, name)
    return part if isinstance(part, PretrainedConfig) else None


def _cut(
    config: PretrainedConfig,
    values: dict[str, Any],
    full: dict[str, Any],
    layers: Layers,
    kept: list[int],
) -> PretrainedConfig:
    values = dict(values)
    cut_layers(layers, values, kept)
    if layers.overrides:
        overrides = values["per_layer_config"]
        values["per_layer_config"] = {
            i: shrink_overrides(own, values, full) for i, own in overrides.items()
        }
    return remade(config, values)


def _has_all_kinds(small: PretrainedConfig, layers: Layers) -> bool:
    """Whether a small config tells its layers apart as the full one does, also where its class works
    that out anew: derives values for each layer, together of all kinds that there are, and has
    layers in and out of each list of layers.
    """
    made = read_layers(small, small.to_dict())
    if made is None:
        return False
    views = [getattr(small, name) for name in layers.views]
    return (
        all(len(view) == made.count for view in views)
        and _kinds(list(layers.views.values())) <= _kinds(views)
        and all(
            _sides(made.indices.get(name, []), made) == _sides(indices, layers)
            for name, indices in layers.indices.items()
        )
    )


def _kinds(views: Sequence[Sequence[Any]]) -> set[tuple[str, ...]]:
    """Return the kinds of layers that values of each layer tell apart: texts as they are, numbers, as
    of experts, of which a small config has fewer, by their order.
    """
    return set(zip(*map(_in_order, views), strict=True))


def _in_order(view: Sequence[Any]) -> list[str]:
    numbers = sorted({value for value in view if type(value) is int})
    return [str(numbers.index(value) if type(value) is int else value) for value in view]


def _sides(indices: Sequence[int], layers: Layers) -> set[bool]:
    return {index in indices for index in range(layers.count)}
