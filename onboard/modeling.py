"""What generated model files build on: the output type and the table of registered model classes."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from onboard.errors import OnboardError

M = TypeVar("M", bound=type[nn.Module])
T = TypeVar("T")

FirstPosition = Callable[[Any], int]

_MODELS: dict[str, type[nn.Module]] = {}
_FIRST_POSITIONS: dict[type[nn.Module], FirstPosition] = {}
_OF_FILE: dict[str, tuple[dict[str, type[nn.Module]], dict[str, Any]]] = {}
"""What each executed model file registered, by the name of its module."""


_CONFIGS: dict[str, Any] = {}
"""Config classes that model files define themselves, by model type."""

AlibiSlopes = torch.Tensor
"""ALiBi's slopes [heads], where transformers passes the bias that they make."""


@dataclass
class CausalLMOutput:
    """`logits` [batch, sequence, vocabulary], in the model's dtype."""

    logits: torch.Tensor


torch.utils._pytree.register_dataclass(CausalLMOutput)


def register_causal_lm(
    config_class: str, model_class: type[nn.Module], first_position: FirstPosition | None = None
) -> None:
    """Register `model_class` under the name of its Hugging Face config class; the last line of a model file.

    `first_position` gives, from a config, the position of a text's first token; None: 0.
    """
    _MODELS[config_class] = model_class
    if first_position is not None:
        _FIRST_POSITIONS[model_class] = first_position


class DividedLinear(nn.Linear):
    """A linear layer, [..., in_features] to [..., out_features], whose output is divided by a constant."""

    def __init__(self, divisor: float, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.divisor = divisor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the layer's output divided by `divisor`."""
        return super().forward(input) / self.divisor


def tie_weights(module: nn.Module, source: nn.Module) -> None:
    """Have `module` use the parameters of `source`, a module of the same structure, as its own."""
    for name, parameter in source.named_parameters():
        path, _, attr = name.rpartition(".")
        setattr(module.get_submodule(path), attr, parameter)


def register_config(config_class: Any) -> None:
    """Register a config class that a model file defines, because that of its repository is code to be trusted."""
    _CONFIGS[config_class.model_type] = config_class


def registered_config(model_type: str) -> Any:
    """Return the config class that a model file defines for a model type; None when transformers' own is used."""
    return _CONFIGS.get(model_type)


def load_model_file(path: Path) -> None:
    """Execute a generated model file, which registers its class; the same bytes are executed once.

    A file of other bytes for the same config class may have been loaded in between: the one loaded last counts.
    """
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    name = f"onboard_generated_{path.stem}_{digest}"
    if name in _OF_FILE:
        for table, own in zip((_MODELS, _CONFIGS), _OF_FILE[name], strict=True):
            table.update(own)
        return
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    before = dict(_MODELS), dict(_CONFIGS)
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _OF_FILE[name] = _added(_MODELS, before[0]), _added(_CONFIGS, before[1])


def _added(table: dict[str, T], before: dict[str, T]) -> dict[str, T]:
    return {key: value for key, value in table.items() if before.get(key) is not value}


def registered_model(config_class: str) -> type[nn.Module]:
    """Return the model class registered for a config class."""
    if config_class not in _MODELS:
        raise OnboardError(f"no generated model is registered for {config_class}", hint="Onboard the model first")
    return _MODELS[config_class]


def first_position(config: Any) -> int:
    """Return the position that the first token of a text has in the model registered for a config."""
    registered = _FIRST_POSITIONS.get(registered_model(type(config).__name__))
    return registered(config) if registered is not None else 0
