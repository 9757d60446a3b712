"""Attention of a single head that code writes without a dimension of heads: [batch, sequence, dim]."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from onboard.analysis.tiny.tiny_prompts import from_zero, prompt, vocabulary
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.trees.syntax import attribute, call
from onboard.codegen.translate.language.values import Code
from onboard.codegen.translate.mechanisms.attention.scores import Scores

Ranks = dict[tuple[type, str], set[int]]
_RANKS: WeakKeyDictionary[nn.Module, Ranks] = WeakKeyDictionary()


def is_of_one_head(weights: Scores, value: Code, frame: Frame) -> bool:
    """Whether queries, keys or values of attention's weights have three dimensions in the small
    model.
    """
    if frame.cls is None or not frame.translator.specialised:
        return False
    tensors = [item.expr for item in (weights.query, weights.key, value) if item is not None]
    names = [item.id for item in tensors if isinstance(item, ast.Name)]
    ranks = _ranks(frame.translator.model)
    return any(ranks.get((frame.cls.cls, each)) == {3} for each in names)


def with_head(weights: Scores, value: Code) -> tuple[Scores, Code]:
    """Return weights and values with a dimension of one head."""
    assert weights.query is not None
    assert weights.key is not None
    query, key = _with_head(weights.query), _with_head(weights.key)
    return replace(weights, query=query, key=key), _with_head(value)


def without_head(attended: Code) -> Code:
    """Return what attention gives, [batch, sequence, dim]."""
    return Code(call(attribute(attended.code(), "squeeze"), ast.Constant(1)))


def _with_head(tensor: Code) -> Code:
    return Code(call(attribute(tensor.code(), "unsqueeze"), ast.Constant(1)))


def _ranks(model: nn.Module) -> Ranks:
    """Return how many dimensions the tensors have that the methods of a small model's modules leave
    in their variables; 0 for those that do not begin with the batch alone, but with heads, too.
    """
    if model not in _RANKS:
        found: Ranks = {}
        inputs = from_zero(prompt(0, seed=3, tokens=vocabulary(model)))
        try:
            batch = len(inputs["input_ids"])
            with _variables_watched(model, found, batch), torch.no_grad():
                model(**inputs, use_cache=False)
        except TypeError:  # it reads something else than tokens
            found = {}
        _RANKS[model] = found
    return _RANKS[model]


@contextmanager
def _variables_watched(model: nn.Module, found: Ranks, batch: int) -> Iterator[None]:
    codes: set[CodeType] = {
        type(module).forward.__code__
        for module in model.modules()
        if hasattr(type(module).forward, "__code__")
    }

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and frame.f_code in codes:
            cls = type(frame.f_locals.get("self"))
            for name, value in frame.f_locals.items():
                if isinstance(value, torch.Tensor):
                    rank = value.dim() if value.shape[:1] == (batch,) else 0
                    found.setdefault((cls, name), set()).add(rank)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)
