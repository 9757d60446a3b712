"""Composite models: a text model with towers for images or sound beside it.

Which part is the text model, the config and the module tree tell: the config by its sub-configs, the tree by what a
call with text alone runs. The rest (the towers) stays as transformers has it and runs eagerly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from onboard.graph.architecture import is_composite, text_config

_TOWER_LAYERS = re.compile(r"(num_(hidden_)?|conf_num_hidden_|encoder_|decoder_|n_)?layers|depth|num_blocks")
_TOWER_WIDTHS: list[tuple[str, int]] = [
    (r"hidden_size|embed_dim|d_model", 32),
    (r"intermediate_size|mlp_dim|\w*ffn_dim", 48),
    (r"(num_|n_)?(attention_|key_value_)?heads|(en|de)coder_attention_heads", 2),
    (r"head_dim", 16),
]
_SPECIAL_TOKEN = re.compile(r"\w+_token_(id|index)")
_LAYERS, _SMALL_IMAGE = 2, 32


def small_composites(
    config: Any, shrink: Callable[[Any], PretrainedConfig], vocabulary: int
) -> Iterator[PretrainedConfig]:
    """Yield small configs of a composite: what its towers' sizes have to fit is their own code's secret.

    First all parts are made small by `shrink`, as the text model is; then the towers by fewer and fewer fields. Widths
    of the text model follow it, and tokens that stand for images keep their side of the `vocabulary`.
    """
    text, small = text_config(config), shrink(config)
    values = config.to_dict()
    widths = {getattr(text, "hidden_size", None): getattr(text_config(small), "hidden_size", None)}
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    towers = {name: part for name, part in parts.items() if isinstance(part, PretrainedConfig) and part is not text}
    fixed = _special_tokens(values, getattr(text, "vocab_size", 0), vocabulary)
    fixed |= {key: widths[size] for key, size in values.items() if _is_width(key) and size in widths}
    yield type(config).from_dict(small.to_dict() | fixed)
    for narrow in (True, False):
        own = {name: _small_tower(part.to_dict(), widths, narrow=narrow) for name, part in towers.items()}
        yield type(config).from_dict(small.to_dict() | fixed | own)


def _special_tokens(values: dict[str, Any], full: int, vocabulary: int) -> dict[str, int]:
    """Return small ids for the tokens that stand for images and the like, distinct ones."""
    names = [key for key, value in values.items() if _SPECIAL_TOKEN.fullmatch(key) and type(value) is int]
    ids = {value: index for index, value in enumerate(sorted({values[key] for key in names}))}
    inside = {key: vocabulary - 1 - ids[values[key]] for key in names if values[key] < full}
    return inside | {key: vocabulary + ids[values[key]] for key in names if key not in inside}


def _is_width(name: str) -> bool:
    return bool(re.fullmatch(r"\w*(hidden_size|_dim)", name))


def _small_tower(values: dict[str, Any], widths: dict[Any, Any], *, narrow: bool) -> dict[str, Any]:
    """Return a tower's config with few layers and, when `narrow`, small sizes; widths of the text model follow it."""
    small = dict(values)
    for key, value in values.items():
        if type(value) is int and _TOWER_LAYERS.fullmatch(key):
            small[key] = min(value, _LAYERS)
        elif isinstance(value, list) and key.endswith(("_indexes", "_indices")):
            small[key] = sorted({min(index, _LAYERS - 1) for index in value if type(index) is int})
        elif narrow and type(value) is int:
            small[key] = _narrow(key, value, widths)
    return small


def _narrow(key: str, value: int, widths: dict[Any, Any]) -> int:
    if (
        value in widths
        and re.fullmatch(r"out\w*_size|projection_dim|output_dim|hidden_size", key)
        and "embed" not in key
    ):
        return int(widths[value])
    return next((size for pattern, size in _TOWER_WIDTHS if re.fullmatch(pattern, key)), value)


def unused_parts(model: nn.Module, called: Collection[str]) -> list[str]:
    """Return the largest parts with weights, as paths, that a call with text alone did not run.

    Only what lies beside the text model counts: a module inside of a layer that happens not to run is the text
    model's own. `called` are the paths of the modules that ran.
    """
    found: list[str] = []

    def visit(path: str, module: Any) -> None:
        for name, child in module.named_children():
            inner = f"{path}.{name}".lstrip(".")
            if inner not in called and not any(item.startswith(f"{inner}.") for item in called):
                found.extend([inner] if child.state_dict() else [])
            elif _holds_parts(child):
                visit(inner, child)
        if text_config(module.config) is not module.config:
            found.extend(f"{path}.{name}".lstrip(".") for name, _ in module.named_parameters(recurse=False))

    if _holds_parts(model):
        visit("", model)
    return found


def _holds_parts(module: nn.Module) -> bool:
    """Whether a module is made of a composite config: towers may be among its children."""
    config = getattr(module, "config", None)
    return isinstance(config, PretrainedConfig) and is_composite(config)


def is_under(name: str, parts: Collection[str]) -> bool:
    """Whether a weight or a module is one of `parts` or lies in one."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def builds(cls: Any, config: PretrainedConfig) -> bool:
    """Whether transformers can make the model of a config."""
    try:
        with torch.device("meta"):
            cls._from_config(config)
    except Exception:  # the caller tries the next one, and the last one's error is shown
        return False
    return True
