"""How many dimensions the positions have with which code looks rows up in tables: [sequence], or
[1, sequence], which gives the rows a dimension in front.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from onboard.analysis.tiny.tiny_prompts import from_zero, prompt, vocabulary
from onboard.hf.copied_model import copied

_LENGTH = 19
"""Tokens: a number that no size of a small model is."""
_RANKS: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()


class _LookedUp(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The numbers of dimensions of positions in `table[positions]`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ranks: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket is torch.ops.aten.index:
            match args:
                case (table, [torch.Tensor() as where]) if _counts(where) and table.dim() == 2:
                    self.ranks.add(where.dim())
        return func(*args, **(kwargs or {}))


def _counts(where: torch.Tensor) -> bool:
    """Whether indices are the positions of a text."""
    return where.shape[-1:] == (_LENGTH,) and bool((where.diff() == 1).all())


def lookup_ranks(model: nn.Module) -> frozenset[int]:
    """Return the numbers of dimensions of positions that a model looks rows of tables up with."""
    if model not in _RANKS:
        inputs = from_zero(prompt(0, length=_LENGTH, seed=3, tokens=vocabulary(model)))
        try:
            with torch.no_grad(), _LookedUp() as found:
                copied(model)(**inputs, use_cache=False)
            _RANKS[model] = frozenset(found.ranks)
        except Exception:  # a small model may take no text of that length
            _RANKS[model] = frozenset()
    return _RANKS[model]
