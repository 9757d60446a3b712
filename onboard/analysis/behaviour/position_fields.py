"""The field of a config that says how many positions a model has, whatever its name: with a small
number there the model runs texts of so many tokens, and fails with longer ones, or has tables of so
many rows and makes them anew for longer ones.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from onboard.analysis.tiny.tiny_config import tiny_config
from onboard.analysis.tiny.tiny_sizes import KNOWN_SIZES

USUAL = "max_position_embeddings"
_SHORT, _LONG = 24, 96
"""Lengths of texts; the long one has a whole number of the short ones, so that it has one of chunks
of that size, too.
"""
_FIRST = 8
"""The length of a text whose call makes the tables that a constructor leaves to the first call."""
_ROOM = 128
_LEAST = 16
"""A number of positions is no smaller."""
_LENGTHS = {"n_ctx", "max_seq_len"}
"""Of the sizes that small models have by name, those that may be it."""
_MOST = 1 << 28
"""Parameters of a small model that is made for this: names of sizes may be unknown."""


def position_field(model_class: Any, made: PretrainedConfig) -> str | None:
    """Return the field that bounds the length of texts; None where there is none, or no small model
    runs, or the field has its usual name.
    """
    if isinstance(getattr(made, USUAL, None), int):
        return None
    small = tiny_config(made)
    with torch.device("meta"):
        size = _elements(model_class, small)
    if not 0 <= size < _MOST:
        return None
    others = KNOWN_SIZES - _LENGTHS
    fields = [
        name
        for name, value in small.to_dict().items()
        if type(value) is int
        and value >= _LEAST
        and not name.endswith("_token_id")
        and name not in others
    ]
    found = (
        name for tell in (_bounds, _regrows) for name in fields if tell(name, model_class, small)
    )
    return next(found, None)


def _bounds(name: str, model_class: Any, small: PretrainedConfig) -> bool:
    short = _made(name, _SHORT, model_class, small)
    if short is None or not _runs(short, _SHORT) or _runs(short, _LONG):
        return False
    roomy = _made(name, _ROOM, model_class, small)
    return roomy is not None and _runs(roomy, _LONG)


def _regrows(name: str, model_class: Any, small: PretrainedConfig) -> bool:
    """Whether the field has the rows of a table that a longer text has made anew."""
    short = _made(name, _SHORT, model_class, small)
    if short is None or not _runs(short, _FIRST):
        return False
    before = _kept(short)
    if not _runs(short, _LONG):
        return False
    after = _kept(short)
    return any(
        _SHORT in shape and max(after.get(place, shape)) >= _LONG > max(shape)
        for place, shape in before.items()
        if shape
    )


def _kept(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what modules keep beside parameters, by place."""
    return {
        f"{path}.{key}": tuple(item.shape)
        for path, module in model.named_modules()
        for key, item in (*vars(module).items(), *module.named_buffers(recurse=False))
        if isinstance(item, torch.Tensor)
    }


def _made(name: str, number: int, model_class: Any, small: PretrainedConfig) -> nn.Module | None:
    """Return the model with a number in a field; None where there is none."""
    try:
        values = {**deepcopy(small.to_dict()), name: number}
        return model_class(type(small).from_dict(values)).float().eval()  # type: ignore[no-any-return]
    except Exception:  # whatever a model's own code raises
        return None


def _elements(model_class: Any, small: PretrainedConfig) -> int:
    try:
        return sum(item.numel() for item in model_class(deepcopy(small)).parameters())
    except Exception:  # constructors may compute
        return 0


@torch.no_grad()
def _runs(model: nn.Module, length: int) -> bool:
    """Whether a model runs a text, with a mask if it needs one."""
    ids = torch.arange(length).remainder(_LEAST).unsqueeze(0)
    for inputs in ({}, {"attention_mask": torch.ones_like(ids)}):
        try:
            model(input_ids=ids, **inputs)
            return True
        except Exception:  # whatever a model's own code raises
            continue
    return False
