"""Multimodal models: configs with parts, and modules that transformers chooses by a part's class."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.auto_factory import _BaseAutoModelClass

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.expressions import objects
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.object_values import Config, Self
from onboard.codegen.translate.language.trees.syntax import attribute
from onboard.codegen.translate.language.values import Value
from onboard.hf import architecture


def text_config(config: Config) -> Config:
    """Return `config.get_text_config()`: the config itself, or the attribute that holds the
    part.
    """
    part = architecture.text_config(config.obj)
    if part is config.obj:
        return config
    holder = next(
        name for name in config.obj.sub_configs if getattr(config.obj, name, None) is part
    )
    return Config(attribute(config.expr, holder), part)


def chosen_class(obj: Any, args: Args) -> type[nn.Module] | None:
    """Return the class that `AutoModel.from_config` or a model's own `_from_config` makes, None for
    others.
    """
    owner: Any = getattr(obj, "__self__", None)
    if not isinstance(owner, type) or obj.__name__ not in ("from_config", "_from_config"):
        return None
    if not issubclass(owner, _BaseAutoModelClass | PreTrainedModel):
        return None
    nothing: type[nn.Module] = PreTrainedModel
    config = next(
        (
            item
            for item in (*args.positional, args.keywords.get("config"))
            if isinstance(item, Config)
        ),
        None,
    )
    if config is None:
        return nothing  # of a part that this config does not have: it cannot be called
    args.keywords.pop("config", None)
    args.positional[:] = [config]
    if issubclass(owner, PreTrainedModel):
        own: type[nn.Module] = owner
        return own
    table: Any = vars(owner)["_model_mapping"]
    chosen = table[type(config.obj)]
    first: type[nn.Module] = chosen[0] if isinstance(chosen, tuple) else chosen
    return first


def input_embeddings(frame: Frame) -> Value | None:
    """Return what `self.get_input_embeddings()` is, as a path from `self`; None where transformers
    finds none.
    """
    assert frame.cls is not None
    modules = [
        module for module in frame.translator.model.modules() if type(module) is frame.cls.cls
    ]
    paths = {_path_of(module) for module in modules}
    if len(paths) != 1 or None in paths:
        return None
    value: Value = Self()
    for part in str(paths.pop()).split("."):
        value = objects.get_attribute(value, part, frame)
    return value


def _path_of(module: Any) -> str | None:
    found = module.get_input_embeddings()
    return next((path for path, child in module.named_modules() if child is found), None)
