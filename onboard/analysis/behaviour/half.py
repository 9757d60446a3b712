"""Whether a model computes in half precision what it computes in float32."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import nn

from onboard.analysis.tiny.tiny_prompts import from_zero, prompt, vocabulary
from onboard.hf.copied_model import copied
from onboard.verify.error import rmse_ratio

_SAME = 0.1
"""Largest error of logits in bfloat16 that is one of rounding."""
_FOUND: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def same_in_half(model: nn.Module) -> bool:
    """Whether a model's code, which may take another path for tensors in half precision, gives the
    same logits but for rounding there.
    """
    if model not in _FOUND:
        _FOUND[model] = _is_same(model)
    return _FOUND[model]


@torch.no_grad()
def _is_same(model: nn.Module) -> bool:
    inputs = from_zero(prompt(0, seed=5, length=40, tokens=vocabulary(model)))
    half = copied(model).to(torch.bfloat16)
    try:
        found, expected = (each(**inputs, use_cache=False).logits for each in (half, model))
    except Exception:  # whatever a model's own code raises
        return False
    return rmse_ratio(found.float(), expected.float()) < _SAME
