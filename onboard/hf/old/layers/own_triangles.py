"""Eager attention of GPT-2 and GPT-NeoX, which hid later tokens by itself in transformers 4: code that
inherits from their models hands it no mask, or that of padding alone.
"""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any

import torch
from torch import nn

_NAMES = {"gpt2": re.compile(r"\bGPT2[A-Z]"), "gpt_neox": re.compile(r"\bGPTNeoX[A-Z]")}
_FUNCTION = "eager_attention_forward"
_CHANGED: set[str] = set()
"""Modules whose attention does by now."""


def hide_later_tokens(text: str) -> list[str]:
    """Have eager attention of the models that a repository's code names hide later tokens where its
    mask does not, from here on; return what was changed.
    """
    facts = []
    for name in (key for key, pattern in _NAMES.items() if pattern.search(text)):
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        if module.__name__ not in _CHANGED:
            _CHANGED.add(module.__name__)
            setattr(module, _FUNCTION, _causal(getattr(module, _FUNCTION)))
            facts.append(f"eager attention of {name} hides later tokens, as in transformers 4")
    return facts


def is_causal_alone(module: nn.Module) -> bool:
    """Whether a module's eager attention hides later tokens without a mask."""
    return any(cls.__module__ in _CHANGED for cls in type(module).__mro__)


def _causal(function: Any) -> Any:
    @functools.wraps(function)
    def attention(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        rows = 1 if attention_mask is None else attention_mask.shape[-2]
        if query.shape[-2] > rows and not getattr(module, "is_cross_attention", False):
            hidden = _triangle(query, key.shape[-2])
            attention_mask = hidden if attention_mask is None else attention_mask + hidden
        return function(module, query, key, value, attention_mask, *args, **kwargs)

    return attention


def _triangle(query: torch.Tensor, keys: int) -> torch.Tensor:
    """Return what is added to the scores of queries [..., queries, size], [queries, keys]."""
    rows = query.shape[-2]
    seen = torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril(keys - rows)
    return torch.zeros(rows, keys, dtype=query.dtype, device=query.device).masked_fill(
        ~seen, torch.finfo(query.dtype).min
    )
