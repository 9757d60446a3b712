"""Transformers' own model of a config; a tower whose packages are missing is left out, so that text
runs without it.
"""

from __future__ import annotations

import copy
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import AutoModel, PreTrainedModel

from onboard.errors import OnboardError
from onboard.hf.architecture import causal_lm_class, refuse_own_code
from onboard.hf.codebooks import with_tokens
from onboard.untrusted.bounds import bounded_modules

_EAGER = "eager"
"""Attention as transformers' files write it out, by its name."""
_GROUPED = 8
"""Rows and columns of experts that torch's grouped product takes are multiples of it."""

_OF_FILES = ("local_files_only", "use_safetensors", "trust_remote_code")
"""Options of `from_pretrained` that say how files are read."""


class MissingTower(nn.Module):
    """Stands for a tower for images or sound that needs packages which are not installed: it has no
    weights.
    """

    def __init__(self, error: ImportError) -> None:
        super().__init__()
        self.packages = re.findall(r"pip install ([\w-]+)", str(error)) or [
            " ".join(str(error).split())
        ]

    def forward(self, *_: Any, **__: Any) -> Any:
        """Raise `OnboardError`: what it is called for is no text."""
        needed = " and ".join(self.packages)
        raise OnboardError(
            f"this model's tower needs the packages {needed}", hint=f"pip install {needed}"
        )


@contextmanager
def without_missing_towers() -> Iterator[None]:
    """Where transformers makes a part of a multimodal model and lacks packages for it, put a
    `MissingTower` there.
    """
    original = AutoModel.from_config

    def from_config(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except ImportError as error:
            return MissingTower(error)

    with mock.patch.object(AutoModel, "from_config", from_config):
        yield


def build_reference(config: Any, **kwargs: Any) -> Any:
    """Return transformers' model of a config, with its own initialisation; `kwargs` are those of
    `_from_config`.
    """
    with without_missing_towers(), bounded_modules(type(config).__name__):
        return with_tokens(from_config(causal_lm_class(config), config, **kwargs))


def from_config(model_class: Any, config: Any, **kwargs: Any) -> Any:
    """Return `model_class._from_config(config, **kwargs)`, which runs whatever its sizes are."""
    return _of_any_size(_from_config(model_class, config, **kwargs))


def _from_config(model_class: Any, config: Any, **kwargs: Any) -> Any:
    """Return the model of a config as its class makes it; code that refuses eager attention, by
    that name, or whose table of attention classes lacks it, gets torch's function. A constructor
    that fails in another dtype than float32, which transformers of its year made all models in,
    runs in that; its parameters get the dtype then.
    """
    before = copy.deepcopy(config)
    try:
        return model_class._from_config(config, **kwargs)
    except (ValueError, AssertionError, KeyError) as error:
        named = error.args == (_EAGER,) or "attn_impl" in said_by(error)
        if kwargs.get("attn_implementation") != _EAGER or not named:
            raise
    except RuntimeError:
        dtype = kwargs.get("dtype") or getattr(before, "dtype", None)
        if dtype in (None, torch.float32):
            raise
        model = model_class._from_config(before, **{**kwargs, "dtype": torch.float32})
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        return model
    return model_class._from_config(before, **{**kwargs, "attn_implementation": "sdpa"})


def said_by(error: BaseException) -> str:
    """Return what an exception says; of an assertion that says nothing, the line of code that asserts
    what does not hold.
    """
    if str(error) or not isinstance(error, AssertionError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].line or "") if frames else ""


def load_reference(
    config: Any, folder: Path, *, state: Mapping[str, torch.Tensor] | None = None, **kwargs: Any
) -> Any:
    """Return transformers' model with a checkpoint's weights; `kwargs` are those of
    `from_pretrained`.

    `state` has the weights where the folder's are quantised: as an unquantised folder would have
    them.

    Raises:
        UsageError: the model's code is of a repository.
    """
    refuse_own_code(config)
    with without_missing_towers():
        loaded = _load(causal_lm_class(config), config, folder, state, kwargs)
    _of_any_size(with_tokens(loaded[0] if isinstance(loaded, tuple) else loaded))
    return loaded


def _of_any_size(model: Any) -> Any:
    """Return a model whose experts run one by one where torch's grouped product, transformers'
    default, refuses their sizes: it takes rows of whole 16 bytes, which eight numbers of any float
    fill.
    """
    if not (isinstance(model, PreTrainedModel) and model._can_set_experts_implementation()):
        return model
    stacks = (weight.shape for weight in model.parameters() if weight.ndim == 3)
    if any(size % _GROUPED for shape in stacks for size in shape[1:]):
        model.set_experts_implementation("eager")
    return model


def _load(
    cls: Any, config: Any, folder: Path, state: Mapping[str, torch.Tensor] | None, kwargs: Any
) -> Any:
    if state is None:
        return cls.from_pretrained(folder, config=config, **kwargs)
    kwargs = {key: value for key, value in kwargs.items() if key not in _OF_FILES}
    return cls.from_pretrained(None, config=unquantised(config), state_dict=dict(state), **kwargs)


def unquantised(config: Any) -> Any:
    """Return a copy of a config that does not say that weights are quantised."""
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return config


def missing_towers(model: nn.Module) -> dict[str, list[str]]:
    """Return the paths of what was left out, and the packages that it needs."""
    return {
        path: module.packages
        for path, module in model.named_modules()
        if isinstance(module, MissingTower)
    }
