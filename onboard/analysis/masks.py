"""Which functions of a modeling file make the causal mask: those that return one whenever they are called."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from transformers import modeling_attn_mask_utils

from onboard.analysis.tiny import prompts

_FAR_BELOW = -1e3
"""What a mask adds to scores that do not count is this or less."""


def mask_makers(model: nn.Module) -> list[str]:
    """Return the names of functions that return exactly causal masks: the model's own, and transformers' old ones.

    A mask is [batch or 1, 1, sequence, sequence], zero at and before a query's position and far below zero after it. It
    is not narrowed by a window, and whoever makes it does so in each of the prompts.
    """
    returned: dict[str, list[bool]] = {}
    files = {inspect.getfile(type(model)), inspect.getfile(modeling_attn_mask_utils)}
    with _returns_watched(files, returned), torch.no_grad():
        for inputs in prompts(model):
            model(**inputs, use_cache=False)
    return sorted(name for name, causal in returned.items() if all(causal))


def is_causal_mask(value: Any) -> bool:
    """Whether a value is a causal mask of more than one position."""
    if not (isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 4):
        return False
    batch, heads, queries, keys = value.shape
    if heads != 1 or queries != keys or queries < 2:
        return False
    later = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    return bool((value[..., later] <= _FAR_BELOW).all()) and bool((value[..., ~later] == 0).all())


@contextmanager
def _returns_watched(files: set[str], returned: dict[str, list[bool]]) -> Iterator[None]:
    """Note of every function in some files what it returns."""

    def watch(frame: FrameType, event: str, value: Any) -> None:
        if event == "return" and frame.f_code.co_filename in files and frame.f_code.co_name != "forward":
            returned.setdefault(frame.f_code.co_name, []).append(is_causal_mask(value))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)
