"""What generated model files build on: the output type and the table of registered model
classes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from onboard.errors import CONSENT, OnboardError

M = TypeVar("M", bound=type[nn.Module])
T = TypeVar("T")
_OF_REPOSITORY = b"onboard.plain_config"
"""What only those files import whose model has a config class in its repository."""

LOADED = "onboard_generated_"
"""What the names of loaded model files begin with, as modules."""

FirstPosition = Callable[[Any], int]

_MODELS: dict[str, type[nn.Module]] = {}
_FIRST_POSITIONS: dict[type[nn.Module], FirstPosition] = {}
_OF_FILE: dict[str, tuple[dict[str, type[nn.Module]], dict[str, Any]]] = {}
"""What each executed model file registered, by the name of its module."""


_CONFIGS: dict[str, Any] = {}
"""Config classes that model files define themselves, by model type."""

AlibiSlopes = torch.Tensor
"""ALiBi's slopes [heads], where transformers passes the bias that they make."""
FoldedHeads = torch.Tensor
"""[batch, sequence, heads, dim], where transformers passes [batch * heads, sequence, dim]."""


@dataclass(frozen=True)
class Codebooks:
    """How one number, a token, stands for what a position holds: a code of each of `count`
    codebooks of `size` codes.

    It is the sum of code[k] * size**k. Most models have one codebook: their tokens are its codes.
    Raises `OnboardError` where tokens do not fit into 64 bits.
    """

    count: int = 1
    size: int = sys.maxsize

    def __post_init__(self) -> None:
        if self.tokens > sys.maxsize:
            raise OnboardError(
                f"a position has a code of each of {self.count} codebooks of {self.size}, which 64 bits cannot hold",
                hint="No such model can be run",
            )

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return int(self.size**self.count)

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the tokens [...] of codes [..., count], int64."""
        return torch.stack([codes[..., k] * self.size**k for k in range(self.count)]).sum(dim=0)

    def unpack(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the codes [..., count] of tokens [...], int64."""
        return torch.stack([tokens // self.size**k % self.size for k in range(self.count)], dim=-1)

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return transformers' input, a row for each codebook of each text, [batch * count, seq],
        of [batch, seq].
        """
        return self.unpack(tokens).movedim(-1, 1).flatten(0, 1)

    def join(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, seq, count * codes] of transformers' [batch * count, seq,
        codes].
        """
        _, seq, codes = logits.shape
        return logits.reshape(-1, self.count, seq, codes).transpose(1, 2).flatten(2)

    def split(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [..., count, codes] of [..., count * codes]: each codebook has a
        distribution of its own.
        """
        return logits.reshape(*logits.shape[:-1], self.count, -1)

    def log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities [..., count * codes] of codes, each within its codebook."""
        return self.split(logits).log_softmax(dim=-1).flatten(-2)


ONE_CODEBOOK = Codebooks()


@dataclass
class CausalLMOutput:
    """`logits` [batch, sequence, vocabulary], in the model's dtype; of several codebooks one after
    the other.
    """

    logits: torch.Tensor


torch.utils._pytree.register_dataclass(CausalLMOutput)


def register_causal_lm(
    config_class: str, model_class: type[nn.Module], first_position: FirstPosition | None = None
) -> None:
    """Register `model_class` under the name of its Hugging Face config class; the last line of a
    model file.

    `first_position` gives, from a config, the position of a text's first token; None: 0.
    """
    _MODELS[config_class] = model_class
    if first_position is not None:
        _FIRST_POSITIONS[model_class] = first_position


class DividedLinear(nn.Linear):
    """A linear layer, [..., in_features] to [..., out_features], whose output is divided by a
    constant.
    """

    def __init__(
        self, divisor: float, in_features: int, out_features: int, bias: bool = True
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.divisor = divisor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the layer's output divided by `divisor`."""
        return super().forward(input) / self.divisor


def colwise(
    layer: nn.Linear,
    input: torch.Tensor,
    *,
    layer_type: str,
    output_sizes: list[int] | None = None,
    tp_min_local_shape: int | list[int] | None = None,
) -> torch.Tensor:
    """Return `layer(input)`, [..., in_features] to [..., out_features], as `torch_linear_simple`
    with tp_mode "colwise", which says what the hints mean: each rank has some of the outputs.
    """
    result: torch.Tensor = torch.ops.onboard.torch_linear_simple(
        input,
        layer.weight,
        layer.bias,
        tp_mode="colwise",
        layer_type=layer_type,
        output_sizes=output_sizes,
        tp_min_local_shape=tp_min_local_shape,
    )
    return result


def rowwise(layer: nn.Linear, input: torch.Tensor, *, layer_type: str) -> torch.Tensor:
    """Return `layer(input)` as `torch_linear_simple` with tp_mode "rowwise": each rank has some of
    the inputs, and outputs are summands that an `all_reduce` behind it adds up.
    """
    return _hinted(layer, input, "rowwise", layer_type)


def replicated(layer: nn.Linear, input: torch.Tensor, *, layer_type: str) -> torch.Tensor:
    """Return `layer(input)` as `torch_linear_simple` with tp_mode "none": each rank has all."""
    return _hinted(layer, input, "none", layer_type)


def _hinted(layer: nn.Linear, input: torch.Tensor, tp_mode: str, layer_type: str) -> torch.Tensor:
    result: torch.Tensor = torch.ops.onboard.torch_linear_simple(
        input, layer.weight, layer.bias, tp_mode=tp_mode, layer_type=layer_type
    )
    return result


def tie_weights(module: nn.Module, source: nn.Module) -> None:
    """Have `module` use the parameters of `source`, a module of the same structure, as its own."""
    for name, parameter in source.named_parameters():
        path, _, attr = name.rpartition(".")
        setattr(module.get_submodule(path), attr, parameter)


def leave_out(module: nn.Module, name: str) -> None:
    """Take the parameters of a name, all biases say, away from a module and from all in it."""
    for part in module.modules():
        if isinstance(getattr(part, name, None), nn.Parameter):
            part.register_parameter(name, None)


def put_in_place(module: nn.Module, path: str, new: nn.Module, places: tuple[str, ...]) -> None:
    """Put another module in the place of one that a module has at a path.

    Args:
        module: changed in place.
        path: of the module that is there, with points.
        new: what comes there.
        places: "Class.name" of each part that may be another module, as forwards are written.

    Raises:
        ValueError: the path leads to another part.
        AttributeError: no module is there.
    """
    owner, _, name = path.rpartition(".")
    module.get_submodule(path)
    parent = module.get_submodule(owner)
    if f"{type(parent).__name__}.{name}" not in places:
        raise ValueError(f"{path} has no other module: that is for {', '.join(places)}")
    setattr(parent, name, new)


def register_config(config_class: Any) -> None:
    """Register a config class that a model file defines, because that of its repository is code to
    be trusted.
    """
    _CONFIGS[config_class.model_type] = config_class


def registered_config(model_type: str) -> Any:
    """Return the config class that a model file defines for a model type; None when transformers'
    own is used.
    """
    return _CONFIGS.get(model_type)


def load_model_file(path: Path) -> None:
    """Execute a generated model file, which registers its class; the same bytes are executed once.

    A file of other bytes for the same config class may have been loaded in between: the one loaded
        last counts. One that was made from code of a model's repository has to pass the allow-list
        of `onboard.vetting` first, or have the user's word.
    """
    data = path.read_bytes()
    name = f"{LOADED}{path.stem}_{hashlib.sha256(data).hexdigest()[:12]}"
    if name in _OF_FILE:
        for table, own in zip((_MODELS, _CONFIGS), _OF_FILE[name], strict=True):
            table.update(own)
        return
    if _OF_REPOSITORY in data and os.environ.get(CONSENT) != "1":
        _vet(path, data)
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    before = dict(_MODELS), dict(_CONFIGS)
    try:
        # The bytes that were looked at, whatever the file or a compiled one beside it has by now.
        exec(compile(data, str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    _OF_FILE[name] = _added(_MODELS, before[0]), _added(_CONFIGS, before[1])


def _vet(path: Path, data: bytes) -> None:
    from onboard.vetting.model_text import vet_model_text

    try:
        vet_model_text(data.decode())
    except OnboardError as error:
        raise OnboardError(
            f"{path.name}: {error.message}",
            hint=f"It comes from a repository's code: read it, then set {CONSENT}=1",
        ) from error


def _added(table: dict[str, T], before: dict[str, T]) -> dict[str, T]:
    return {key: value for key, value in table.items() if before.get(key) is not value}


def is_registered(config_class: str) -> bool:
    """Whether a model class is registered for a config class."""
    return config_class in _MODELS


def registered_model(config_class: str) -> type[nn.Module]:
    """Return the model class registered for a config class."""
    if not is_registered(config_class):
        raise OnboardError(
            f"no generated model is registered for {config_class}", hint="Onboard the model first"
        )
    return _MODELS[config_class]


def first_position(config: Any) -> int:
    """Return the position that the first token of a text has in the model registered for a
    config.
    """
    registered = _FIRST_POSITIONS.get(registered_model(type(config).__name__))
    return registered(config) if registered is not None else 0
