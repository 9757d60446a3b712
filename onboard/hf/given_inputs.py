"""Inputs that the forward of a repository's own model is given besides tokens, or spared, where it
does not run otherwise.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache


def give_masks(model_class: Any) -> None:
    """Have a class's forward, which fails without a mask, get one of ones where it is given none."""
    forward = model_class.forward

    @functools.wraps(forward)
    def masked(self: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        if input_ids is not None and kwargs.get("attention_mask") is None and not args:
            kwargs["attention_mask"] = torch.ones_like(input_ids)
        return forward(self, input_ids, *args, **kwargs)

    model_class.forward = masked


def give_truth_masks(model_class: Any) -> None:
    """Have a class's forward, which fails with a mask of zeros and ones, get it as truth values."""
    forward = model_class.forward

    @functools.wraps(forward)
    def true_or_not(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(mask := kwargs.get("attention_mask"), torch.Tensor) and mask.dim() == 2:
            kwargs["attention_mask"] = mask.bool()
        return forward(self, *args, **kwargs)

    model_class.forward = true_or_not


def give_positions(model_class: Any) -> None:
    """Have a class's forward, which fails without positions, get those behind what its cache holds
    where it is given none.
    """
    forward = model_class.forward

    @functools.wraps(forward)
    def counted(self: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        if input_ids is not None and kwargs.get("position_ids") is None and not args:
            cache = kwargs.get("past_key_values")
            behind = cache.get_seq_length() if isinstance(cache, Cache) else 0
            ends = torch.ones_like(input_ids).cumsum(-1)
            kwargs["position_ids"] = ends - 1 + behind
        return forward(self, input_ids, *args, **kwargs)

    model_class.forward = counted


def spare_masks(model_class: Any, *, always: bool = False) -> None:
    """Have a class's forward, which fails with a mask where a text has one token, or always, get
    none there.
    """
    forward = model_class.forward

    @functools.wraps(forward)
    def spared(self: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        if always or (input_ids is not None and input_ids.shape[1] == 1):
            kwargs.pop("attention_mask", None)
        return forward(self, input_ids, *args, **kwargs)

    model_class.forward = spared


def spare_positions(model_class: Any) -> None:
    """Have a class's forward, which fails with positions, get none: it counts them."""
    forward = model_class.forward

    @functools.wraps(forward)
    def spared(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("position_ids", None)
        return forward(self, *args, **kwargs)

    spared.counts_itself = True  # type: ignore[attr-defined]
    model_class.forward = spared


def give_caches(model_class: Any) -> None:
    """Have a class's forward, which fails where it is to keep nothing, keep what it would for later
    tokens.
    """
    forward = model_class.forward

    @functools.wraps(forward)
    def keeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **{**kwargs, "use_cache": True})

    keeping.keeps = True  # type: ignore[attr-defined]
    model_class.forward = keeping


def keeps(model_class: Any) -> bool:
    """Whether a class's forward always keeps something for later tokens."""
    return getattr(model_class.forward, "keeps", False)


def counts_itself(model_class: Any) -> bool:
    """Whether a class's forward is spared positions."""
    return getattr(model_class.forward, "counts_itself", False)


def hands_no_mask(model: nn.Module, mask: torch.Tensor) -> bool:
    """Whether a model's own preparation for generation leaves out a mask, [batch, length], or its
    own generation knows none.
    """
    generate: Any = getattr(model, "generate", None)
    if generate is not None and not generate.__module__.startswith("transformers."):
        return "attention_mask" not in inspect.getsource(generate)
    prepare: Any = getattr(model, "prepare_inputs_for_generation", None)
    if prepare is None or prepare.__module__.startswith("transformers."):
        return False
    try:
        return "attention_mask" not in prepare(mask, attention_mask=mask, use_cache=False)
    except Exception:  # older code asks for more, which it gets from transformers of its time
        return False
