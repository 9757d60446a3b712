"""How many dimensions tensors have in what a model does with a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from onboard.analysis.tiny.tiny_prompts import from_zero, prompt, vocabulary
from onboard.hf.copied_model import copied

LENGTH = 19
"""Tokens: a number that no size of a small model is."""
Look = Callable[[Any, Any], Iterator[int]]
"""Yields the numbers of dimensions that a call of a function of ATen, with its arguments, shows."""
_SEEN: WeakKeyDictionary[nn.Module, dict[Look, frozenset[int]]] = WeakKeyDictionary()


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what is shown."""

    def __init__(self, look: Look) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.look = look
        self.ranks: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.ranks.update(self.look(func.overloadpacket, args))
        return func(*args, **(kwargs or {}))


def seen_ranks(model: nn.Module, look: Look) -> frozenset[int]:
    """Return what a model's calls show while it reads a text of `LENGTH` tokens; nothing where it takes
    none.
    """
    seen = _SEEN.setdefault(model, {})
    if look not in seen:
        inputs = from_zero(prompt(0, length=LENGTH, seed=3, tokens=vocabulary(model)))
        try:
            with torch.no_grad(), _Watching(look) as found:
                copied(model)(**inputs, use_cache=False)
            seen[look] = frozenset(found.ranks)
        except Exception:  # a small model may take no text of that length
            seen[look] = frozenset()
    return seen[look]
