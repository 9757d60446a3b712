"""Whether a model computes in half precision what it computes in float32."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import nn

from onboard.analysis.tiny.tiny_prompts import from_zero, prompt, vocabulary
from onboard.hf.copied_model import copied
from onboard.verify.error import rmse_ratio

_SAME = 0.1
"""Largest error of logits in half precision that is one of rounding."""
_FOUND: WeakKeyDictionary[nn.Module, dict[torch.dtype, bool]] = WeakKeyDictionary()


def same_in_half(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether a model's code, which may take another path for tensors in half precision, gives the
    same logits but for rounding there.
    """
    found = _FOUND.setdefault(model, {})
    if dtype not in found:
        found[dtype] = _is_same(model, dtype)
    return found[dtype]


@torch.no_grad()
def _is_same(model: nn.Module, dtype: torch.dtype) -> bool:
    inputs = from_zero(prompt(0, seed=5, length=40, tokens=vocabulary(model)))
    half = copied(model).to(dtype)
    try:
        found, expected = (each(**inputs, use_cache=False).logits for each in (half, model))
    except Exception:  # whatever a model's own code raises
        return False
    return rmse_ratio(found.float(), expected.float()) < _SAME
