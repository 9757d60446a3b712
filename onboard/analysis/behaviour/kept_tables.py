"""Tables that a forward makes anew, although they say what those of the constructor say."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onboard.analysis.tiny.tiny_prompts import from_zero, prompt, vocabulary
from onboard.hf.copied_model import copied

_MOST_ROWS = 4096
"""Of tables, beyond which no text is read to see what becomes of them."""
_BEYOND = 9


def keeps_table(model: nn.Module, cls: type, attr: str) -> bool:
    """Whether the forward of a class leaves in an attribute the table that the constructor made, or,
    where the config says how many rows that has, one with more: of a short text, and of one that is
    longer than the table.
    """
    made = _tables(model, cls, attr)
    if not made or not all(map(_is_table, made)):
        return False
    rows = max(max(table.shape) for table in made)
    if rows > _MOST_ROWS:
        return False
    said = rows in _numbers(model)
    return all(
        _same(one, other) and (said or one.shape == other.shape)
        for length in (5, rows + _BEYOND)
        for one, other in zip(made, _left(model, cls, attr, length), strict=True)
    )


def _numbers(model: nn.Module) -> set[object]:
    """Return the whole numbers of a model's config."""
    return {value for value in vars(model.config).values() if type(value) is int}


def _tables(model: nn.Module, cls: type, attr: str) -> list[Any]:
    return [getattr(item, attr, None) for item in model.modules() if type(item) is cls]


def _is_table(item: object) -> bool:
    if not isinstance(item, torch.Tensor) or isinstance(item, nn.Parameter):
        return False
    return item.is_floating_point() and item.numel() > 1


@torch.no_grad()
def _left(model: nn.Module, cls: type, attr: str, length: int) -> list[Any]:
    """Return what is there when a copy of the model has read a text."""
    model = copied(model)
    inputs = from_zero(prompt(0, length=length, batch=1, seed=3, tokens=vocabulary(model)))
    try:
        model(**inputs, use_cache=False)
    except Exception:  # whatever a model's own code raises for a long text
        return [None for _ in _tables(model, cls, attr)]
    return _tables(model, cls, attr)


def _same(one: torch.Tensor, other: object) -> bool:
    """Whether two tables say the same as far as both go, in one of their dimensions."""
    if not isinstance(other, torch.Tensor) or one.dim() != other.dim():
        return False
    sizes = [min(pair) for pair in zip(one.shape, other.shape, strict=True)]
    if sum(a != b for a, b in zip(one.shape, other.shape, strict=True)) > 1:
        return False
    common = tuple(slice(size) for size in sizes)
    return torch.allclose(one[common], other[common].to(one.dtype), rtol=1e-6, atol=1e-6)
