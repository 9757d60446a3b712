"""Multimodal models: a text model with towers for images or sound beside it.

Which part is the text model, the config and the module tree tell: the config by its sub-configs,
the tree by what a call with text alone runs. The rest (the towers) stays as transformers has it and
runs eagerly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PretrainedConfig

from onboard.analysis.tiny.tiny_media import LAYER_COUNT, fit_tower, tokens_of_images
from onboard.hf.architecture import is_composite, text_config
from onboard.hf.config_field import remade
from onboard.hf.hf_model import without_missing_towers

_TOWER_WIDTHS: list[tuple[str, int]] = [
    (r"hidden_size|embed_dim|d_model", 32),
    (r"intermediate_size|mlp_dim|\w*ffn_dim", 48),
    (r"(num_|n_)?(attention_|key_value_)?heads|(en|de)coder_attention_heads", 2),
    (r"head_dim", 16),
]
_SPECIAL_TOKEN = re.compile(r"(?!(pad|bos|eos)_)\w+_token_(id|index)")
_OUTPUT = re.compile(r"out\w*_size|projection_dim|output_dim")
_LAYERS = 2


def small_composites(
    config: Any, shrink: Callable[[Any], PretrainedConfig], vocabulary: int
) -> Iterator[PretrainedConfig]:
    """Yield small configs of a multimodal model: what its towers' sizes have to fit is their own
    code's secret.

    First all parts are made small by `shrink`, as the text model is; then the towers by fewer and
    fewer fields. Widths of the text model follow it, images and sounds are as small as the towers
    that take them, and tokens that stand for them are in the `vocabulary`.
    """
    text, values = text_config(config), config.to_dict()
    small_text = shrink(text)
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    towers = {
        name: part
        for name, part in parts.items()
        if isinstance(part, PretrainedConfig) and part is not text
    }
    widths = {getattr(text, "hidden_size", None): getattr(small_text, "hidden_size", None)}
    fixed = _special_tokens(values, vocabulary)
    fixed |= {
        key: widths[size] for key, size in values.items() if _is_width(key) and size in widths
    }
    if text is config:
        fixed = small_text.to_dict() | fixed
    else:
        fixed |= {name: small_text.to_dict() for name, part in parts.items() if part is text}
    for shrink_tower in (shrink, _small_tower, _shallow_tower):
        with suppress(ValueError, StrictDataclassError):  # a config class that refuses these sizes
            own = {name: _follow(part, shrink_tower(part), widths) for name, part in towers.items()}
            own = {name: fit_tower(own[name], part.to_dict()) for name, part in towers.items()}
            tokens = tokens_of_images(
                values, {name: part.to_dict() for name, part in towers.items()}
            )
            yield remade(config, values | fixed | tokens | own)
    own = {name: _follow(part, part, widths) for name, part in towers.items()}
    yield remade(config, values | fixed | own)


def _follow(
    tower: PretrainedConfig, small: PretrainedConfig, widths: dict[Any, Any]
) -> dict[str, Any]:
    """Return a small tower's values; what comes out of it is as wide as the text model where it was
    so.

    The output's own field is the text model's width even where a class's defaults have another one.
    """
    full: dict[str, Any] = tower.to_dict()
    values: dict[str, Any] = small.to_dict()
    outputs = [key for key, size in full.items() if _OUTPUT.fullmatch(key) and size in widths]
    own = {"out_hidden_size": next(iter(widths.values()))} if full.get("out_hidden_size") else {}
    return values | own | {key: widths[full[key]] for key in outputs}


def _special_tokens(values: dict[str, Any], vocabulary: int) -> dict[str, int]:
    """Return small ids for the tokens that stand for images and the like, distinct ones that can be
    embedded.
    """
    names = [
        key for key, value in values.items() if _SPECIAL_TOKEN.fullmatch(key) and type(value) is int
    ]
    ids = {value: index for index, value in enumerate(sorted({values[key] for key in names}))}
    return {key: vocabulary - 1 - ids[values[key]] for key in names}


def _is_width(name: str) -> bool:
    return bool(re.fullmatch(r"\w*(hidden_size|_dim)", name))


def _small_tower(tower: PretrainedConfig) -> PretrainedConfig:
    """Return a tower's config with few layers and small widths."""
    values = _shallow_tower(tower).to_dict()
    values |= {key: _narrow(key, value) for key, value in values.items() if type(value) is int}
    return type(tower).from_dict(values)


def _shallow_tower(tower: PretrainedConfig) -> PretrainedConfig:
    """Return a tower's config with few layers."""
    values: dict[str, Any] = tower.to_dict()
    for key, value in values.items():
        if type(value) is int and LAYER_COUNT.fullmatch(key):
            values[key] = min(value, _LAYERS)
        elif isinstance(value, list) and key.endswith(("_indexes", "_indices")):
            values[key] = sorted({min(index, _LAYERS - 1) for index in value if type(index) is int})
    return type(tower).from_dict(values)


def _narrow(key: str, value: int) -> int:
    return next((size for pattern, size in _TOWER_WIDTHS if re.fullmatch(pattern, key)), value)


def unused_parts(model: nn.Module, called: Collection[str]) -> list[str]:
    """Return the largest parts, as paths, that a call with text alone did not run.

    Only what lies beside the text model counts: a module inside of a layer that happens not to run
    is the text model's own. `called` are the paths of the modules that ran.
    """
    found: list[str] = []

    def visit(path: str, module: Any) -> None:
        for name, child in module.named_children():
            inner = f"{path}.{name}".lstrip(".")
            if inner not in called and not any(item.startswith(f"{inner}.") for item in called):
                found.extend(
                    [inner]
                    if child.state_dict() or not type(child).__module__.startswith("torch.")
                    else []
                )
            elif _holds_parts(child):
                visit(inner, child)
        if text_config(module.config) is not module.config:
            found.extend(
                f"{path}.{name}".lstrip(".") for name, _ in module.named_parameters(recurse=False)
            )

    if _holds_parts(model):
        visit("", model)
    return found


def _holds_parts(module: nn.Module) -> bool:
    """Whether a module is made of a multimodal config, or what lies in it of another config: towers
    may be among its children.
    """
    configs = [getattr(each, "config", None) for each in module.modules()]
    kinds = {type(config) for config in configs if isinstance(config, PretrainedConfig)}
    return isinstance(configs[0], PretrainedConfig) and (is_composite(configs[0]) or len(kinds) > 1)


def is_under(name: str, parts: Collection[str]) -> bool:
    """Whether a weight or a module is one of `parts` or lies in one."""
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def builds(cls: Any, config: PretrainedConfig) -> bool:
    """Whether transformers can make the model of a config."""
    try:
        with torch.device("meta"), without_missing_towers():
            cls._from_config(config)
    except Exception:  # the caller tries the next one, and the last one's error is shown
        return False
    return True
