"""The numbers that a model's code may compare a length or a position with, and prompts on both
sides of each.

Most code is translated as it stands, but blocks that are recognised are written anew: what one of
them does from some length or position on is only seen by a prompt that goes so far.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from onboard.analysis.behaviour.code_numbers import code_of, constants_of, literals
from onboard.analysis.behaviour.layer_numbers import named_layers
from onboard.analysis.tiny.tiny_config import tiny_config
from onboard.analysis.tiny.tiny_model import build_small
from onboard.analysis.tiny.tiny_prompts import (
    begins_at_zero,
    from_zero,
    prompt,
    runs,
    vocabulary,
)
from onboard.analysis.tiny.tiny_sizes import KNOWN_SIZES, MAX_POSITIONS
from onboard.hf.architecture import text_config
from onboard.hf.copied_model import copied

LONGEST = 2048
"""The greatest number that a prompt is tried with as many tokens as, and more; positions behind it
are tried by prompts that begin there.
"""
_FARTHEST = 1 << 17
_COVERED = 19
"""Any other prompt has a token of a higher index: it has 21."""
_BEYOND = 9
_POSITIONS = ("max_position_embeddings", "max_seq_len", "n_ctx")
_MOST_ROWS = 8
_DIVIDE = (ast.Div, ast.FloorDiv, ast.Mod)
_EQUAL = (ast.Eq, ast.NotEq, ast.In, ast.NotIn, ast.Is, ast.IsNot)
_BOUND = frozenset({"clamp", "clip", "min", "max", "clamp_min", "clamp_max", "minimum", "maximum"})


def build_roomy(config: PretrainedConfig) -> nn.Module:
    """Return the tiny model of a config, with positions behind each threshold that the checkpoint's
    own go beyond, and with the layers that code names by number.
    """
    small = tiny_config(config)
    model = build_small(small)
    deep = tiny_config(config, layers=max(named_layers(model), default=-2) + 2)
    beyond = [
        each
        for each in sorted({*thresholds(model), *_lengths(model)})
        if positions(small) <= each < min(positions(config), _FARTHEST)
    ]
    if beyond and hasattr(text_config(deep), _POSITIONS[0]):
        for name in _POSITIONS:  # tables may be as long as one of them, and positions another
            if isinstance(getattr(text_config(deep), name, None), int):
                setattr(text_config(deep), name, beyond[-1] + 2 * _BEYOND)
    return model if deep.to_dict() == small.to_dict() else build_small(deep)


def positions(config: Any) -> int:
    """Return how many positions a config allows; a great many when it does not say."""
    limits = [getattr(text_config(config), name, None) for name in _POSITIONS]
    return min(
        (limit for limit in limits if isinstance(limit, int) and limit > 0), default=_FARTHEST
    )


def crossing_prompts(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """Return prompts of one row that pass each threshold behind those that other prompts pass,
    where positions allow.

    One is long, and passes whatever number the code has; positions behind it are reached by short
    ones, if the model heeds positions.
    """
    lengths = _lengths(model)
    room = _room(model, lengths)
    near = [each for each in lengths if each < room]
    one = {"batch": 1, "tokens": vocabulary(model)}
    found = [prompt(0, length=min(near[-1] + _BEYOND, room), seed=5, **one)] if near else []
    if begins_at_zero(model):
        return found
    starts = [each - _BEYOND for each in thresholds(model) if LONGEST < each < room]
    return [
        *found,
        *(prompt(start, length=min(2 * _BEYOND, room - start), seed=6, **one) for start in starts),
    ]


def _room(model: nn.Module, lengths: list[int]) -> int:
    """Return how many tokens a text may have; where its config does not say, what it runs with of
    those that pass all of `lengths`.
    """
    if _says_positions(model):
        return positions(model.config)
    long = max(lengths, default=0) + _BEYOND
    fits = runs(copied(model), prompt(0, long, 1, tokens=vocabulary(model)))
    return max(long, MAX_POSITIONS) if fits else MAX_POSITIONS


def _says_positions(model: nn.Module) -> bool:
    """Whether the model's config says how long texts may be."""
    config: Any = model.config
    return hasattr(text_config(config), _POSITIONS[0])


def exact_prompts(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """Return prompts with just as many tokens, or rows if few, as some number that code asks sizes
    to be equal to.

    To be a multiple of a number is such a question, too.
    """
    config: Any = model.config
    written = {number for tree in code_of(model) for number in _exact_numbers(tree)}
    numbers = {abs(value) for value in written | _fields(model)}
    lengths = sorted(each for each in numbers if 1 < each <= min(LONGEST, positions(config)))
    rows = [each for each in lengths if each <= _MOST_ROWS]
    tokens = vocabulary(model)
    found = [prompt(0, length=each, batch=1, seed=8, tokens=tokens) for each in lengths]
    if not _says_positions(model):  # a table may have a field of another name for its size
        found = [each for each in found if runs(copied(model), each)]
    return found + [
        from_zero(prompt(0, length=_BEYOND, batch=each, seed=9, tokens=tokens)) for each in rows
    ]


def thresholds(model: nn.Module) -> list[int]:
    """Return the numbers, sorted, that stand in comparisons, bounds and divisions of the code that
    a model runs.

    Those of the model's config are among them, but for the sizes that every tiny model has.
    """
    written = {number for tree in code_of(model) for number in _numbers(tree)}
    return sorted({abs(value) for value in written | _fields(model)})


def _lengths(model: nn.Module) -> list[int]:
    """Return the numbers, sorted, that a long prompt is to pass: in the code that a model runs any
    may be of tokens, as a stride, a bound of a slice or the size of a table.
    """
    written = literals(*code_of(model), *constants_of(model))
    return sorted(each for each in {*written, *thresholds(model)} if _COVERED < each <= LONGEST)


def _fields(model: nn.Module) -> set[int]:
    own: Any = model.config
    fields = [value for name, value in own.to_dict().items() if name not in KNOWN_SIZES]
    return {int(value) for value in fields if isinstance(value, int)}


def _numbers(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=others):
                yield from literals(left, *others)
            case ast.BinOp(op=op, right=right) if isinstance(op, _DIVIDE):
                yield from literals(right)
            case ast.Call(
                func=ast.Attribute(attr=name) | ast.Name(id=name), args=args, keywords=keywords
            ):
                if name in _BOUND:
                    yield from literals(*args, *(item.value for item in keywords))


def _exact_numbers(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others) if any(
                isinstance(op, _EQUAL) for op in ops
            ):
                yield from literals(left, *others)
            case ast.BinOp(op=ast.Mod(), right=right):
                yield from literals(right)
