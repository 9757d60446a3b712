"""Tokens that code may treat by themselves: those that it compares ids with, and those that the config
names. A random text has none of them, and a small vocabulary may lack them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from onboard.analysis.behaviour.code_numbers import code_of, constants_of, literals
from onboard.analysis.behaviour.thresholds import build_roomy, positions
from onboard.analysis.tiny.tiny_config import KEPT_SIZES
from onboard.analysis.tiny.tiny_model import VOCABULARY_SIZES
from onboard.analysis.tiny.tiny_prompts import from_zero
from onboard.errors import OnboardError

_COMPARING = frozenset({"eq", "ne", "gt", "lt", "ge", "le", "isin", "where"})
_MEDIA = re.compile(r"image|video|vision|visual|audio|speech|media")
"""Fields of what no text has."""
_LENGTH, _BETWEEN = 96, 12
"""Tokens of a text, at most, and those before, between and behind the ones that are special."""


def with_vocabulary(config: PretrainedConfig) -> nn.Module | None:
    """Return a small model with the vocabulary of the whole one; None where its code makes none."""
    kept = KEPT_SIZES.get(type(config))
    KEPT_SIZES[type(config)] = (kept or frozenset()) | VOCABULARY_SIZES
    try:
        return build_roomy(config)
    except OnboardError:  # its sizes belong together
        return None
    finally:
        KEPT_SIZES.pop(type(config))
        if kept is not None:
            KEPT_SIZES[type(config)] = kept


def words_of(model: nn.Module) -> int:
    """Return the size of a model's vocabulary, 0 where its config has none by a known name."""
    found = (getattr(model.config, name, None) for name in VOCABULARY_SIZES)
    return min((size for size in found if type(size) is int), default=0)


def special_tokens(model: nn.Module, size: int) -> list[int]:
    """Return the tokens of a vocabulary of so many that a model's own code compares something with,
    with their neighbours where they may be a bound, and the numbers of its config, which may be others.
    """
    numbers = {near for number in _compared(model) for near in range(number - 1, number + 2)}
    config: Any = model.config
    numbers.update(_within(config.to_dict()))
    return sorted(each for each in numbers if 0 <= each < size)


def _within(value: Any) -> Iterator[int]:
    """Yield the whole numbers in a config's field, lists and parts, but those of other media."""
    match value:
        case bool():
            return
        case int():
            yield value
        case list() | tuple():
            for each in value:
                yield from _within(each)
        case dict():
            for key, each in value.items():
                if not _MEDIA.search(str(key)):
                    yield from _within(each)


def _compared(model: nn.Module) -> Iterator[int]:
    """Yield the whole numbers that a model's code compares with, or that it gives names beside its
    classes.
    """
    yield from literals(*constants_of(model))
    for node in (inside for tree in code_of(model) for inside in ast.walk(tree)):
        match node:
            case ast.Compare(left=left, comparators=others):
                yield from literals(left, *others)
            case ast.Call(func=ast.Attribute(attr=attr) | ast.Name(id=attr), args=args) if (
                attr in _COMPARING
            ):
                yield from literals(*args)


def special_texts(model: nn.Module, tokens: list[int], size: int) -> Iterator[dict[str, Any]]:
    """Yield prompts [1, length] of random tokens, within a model's positions, with each of some tokens at
    a place of its own in one of them. One row is enough, and the logits of a whole vocabulary are many.
    """
    generator = torch.Generator().manual_seed(31)
    length = min(_LENGTH, positions(model.config))
    room = max(1, length - _BETWEEN)
    for part in (tokens[i : i + room] for i in range(0, len(tokens), room)):
        ids = torch.randint(size, (1, length), generator=generator)
        places = torch.randperm(length - 2, generator=generator)[: len(part)] + 1
        ids[0, places] = torch.tensor(part)
        yield from_zero({"input_ids": ids, "position_ids": torch.empty(0)})
