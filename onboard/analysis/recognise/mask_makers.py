"""Which functions of a modeling file make the causal mask: those that return one whenever they are
called.

Old ones return it as truth values, beside a mask of the padding.
"""

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

from onboard.analysis.repository_source import PACKAGE
from onboard.analysis.tiny.tiny_prompts import prompts
from onboard.hf.architecture import text_config

_ALONE = (["added"], ["square"], ["window"], ["window+1"], ["hidden"], ["seen"])
"""Kinds of masks that a function may return alone."""
FAR_BELOW = -1e3
"""What a mask adds to scores that do not count is this or less."""


def mask_makers(model: nn.Module) -> dict[str, list[str]]:
    """Return functions that return exactly causal masks, the model's own and transformers' old
    ones, and what else.

    A mask is [batch or 1, 1, sequence, sequence or more], zero at and before a query's position and far
    below zero after it ("added"), or before the config's window, too ("window"; "window+1": one key
    more is seen), or it is true after it ("hidden"). It may lack dimensions before the last two, and is
    then "square" where it is added, or true, or one, at and before it ("seen"). Whoever makes it does
    so in each of the prompts. A function may also return a pair where each prompt has a mask of padding: that one
    ("ones") and a causal one [batch, sequence, sequence] that is true at and before a query's
    position ("seen").
    """
    alone, beside = (_returned(model, padding=padding) for padding in (False, True))
    pairs = {name: kinds for name, kinds in beside.items() if sorted(kinds) == ["ones", "seen"]}
    return dict(
        sorted(({name: kinds for name, kinds in alone.items() if kinds in _ALONE} | pairs).items())
    )


def _returned(model: nn.Module, *, padding: bool) -> dict[str, list[str]]:
    """Return what kinds of masks each function returns in all prompts, with or without a mask of
    padding.
    """
    returned: dict[str, list[list[str]]] = {}
    files = {inspect.getfile(modeling_attn_mask_utils), *_own_files(model)}
    texts = prompts(model)  # which runs the model, too
    window = getattr(text_config(model.config), "sliding_window", None)
    with _returns_watched(files, returned, window), torch.no_grad():
        for inputs in texts:
            mask = {"attention_mask": torch.ones_like(inputs["input_ids"])} if padding else {}
            model(**inputs, **mask, use_cache=False)
    return {
        name: kinds[0]
        for name, kinds in returned.items()
        if all(kind == kinds[0] for kind in kinds)
    }


def _kinds(value: Any, window: int | None) -> list[str]:
    """Return the kinds of masks that a value has, "" for anything else."""
    for kind, width in _widths(window).items():
        if is_causal_mask(value, width):
            return [kind]
    if is_hiding_mask(value):
        return ["hidden"]
    if isinstance(value, torch.Tensor) and value.dim() in (2, 3) and value.numel():
        return [_kind_of_square(value, window)]
    return [_kind(item) for item in value] if isinstance(value, tuple) else [""]


def _kind_of_square(value: torch.Tensor, window: int | None) -> str:
    """Return the kind of a mask [queries, keys], or of one for each text; "" for anything else."""
    whole = value.reshape(-1, 1, *value.shape[-2:])
    for kind, width in _widths(window).items():
        if is_causal_mask(whole, width):
            return "square" if kind == "added" else kind
    truth = whole != 0
    if not torch.equal(truth.to(value.dtype), whole) or value.shape[-1] != value.shape[-2]:
        return ""
    if is_hiding_mask(truth):
        return "hidden"
    lower = torch.ones_like(truth).tril()
    return "seen" if truth.shape[-1] > 1 and torch.equal(truth, lower) else ""


def _kind(item: Any) -> str:
    if not isinstance(item, torch.Tensor) or item.is_floating_point():
        return ""
    if item.dim() == 2 and bool((item == 1).all()):
        return "ones"
    square = item.dim() == 3 and item.shape[1] == item.shape[2] > 1 and item.dtype == torch.bool
    return "seen" if square and bool((item == torch.ones_like(item).tril()).all()) else ""


def _widths(window: int | None) -> dict[str, int | None]:
    """Return how many keys the masks of each kind show that are added."""
    return {"added": None} | ({"window": window, "window+1": window + 1} if window else {})


def is_causal_mask(value: Any, width: int | None = None) -> bool:
    """Whether a value is a causal mask of more than one position, which shows the last `width` keys
    (None: all). It may have keys behind the text's, which it hides and attention cuts off.
    """
    if not (isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 4):
        return False
    batch, heads, queries, keys = value.shape
    if heads != 1 or keys < queries or queries < 2:
        return False
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    if width is not None:
        hidden |= torch.ones_like(hidden).tril(-width)
    return bool((value[..., hidden] <= FAR_BELOW).all()) and bool((value[..., ~hidden] == 0).all())


def is_hiding_mask(value: Any) -> bool:
    """Whether a value is true of the keys after each query, of more than one."""
    if not (isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.dim() == 4):
        return False
    _, heads, queries, keys = value.shape
    square = heads == 1 and queries == keys > 1
    return square and bool((value == torch.ones_like(value).triu(1)).all())


def _own_files(model: nn.Module) -> set[str]:
    """Return the file of a model's class, and all others of its repository."""
    package = type(model).__module__.split(".")[0]
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
    beside = modules if package == PACKAGE else []
    files = [getattr(module, "__file__", None) for module in beside]
    return {inspect.getfile(type(model)), *filter(None, files)}


@contextmanager
def _returns_watched(
    files: set[str], returned: dict[str, list[list[str]]], window: int | None
) -> Iterator[None]:
    """Note of every function in some files what it returns."""

    def watch(frame: FrameType, event: str, value: Any) -> None:
        if (
            event == "return"
            and frame.f_code.co_filename in files
            and frame.f_code.co_name != "forward"
        ):
            returned.setdefault(frame.f_code.co_name, []).append(_kinds(value, window))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)
