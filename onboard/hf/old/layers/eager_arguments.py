"""Eager attention of a repository's code that takes fewer arguments than its layers hand on: PyTorch's,
which users get, takes any.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection
from types import ModuleType
from typing import Any

_FUNCTION = "eager_attention_forward"
_HEEDED = "is_causal"
"""What PyTorch's attention goes by: without it, eager attention would be another."""


def spare_arguments(code: Collection[ModuleType]) -> list[str]:
    """Have the eager attention that modules define, and that takes no further arguments by name, be
    spared those that it has no parameters for. Return what was changed.
    """
    facts = []
    for module in code:
        attend = vars(module).get(_FUNCTION)
        if not inspect.isfunction(attend) or attend.__module__ != module.__name__:
            continue
        taken = inspect.signature(attend).parameters
        if any(item.kind is item.VAR_KEYWORD for item in taken.values()):
            continue
        setattr(module, _FUNCTION, _spared(attend, {*taken, _HEEDED}))
        name = module.__name__.rpartition(".")[2]
        facts.append(f"eager attention of {name} is spared arguments that it does not take")
    return facts


def _spared(attend: Any, taken: Collection[str]) -> Any:
    @functools.wraps(attend)
    def attention(*args: Any, **kwargs: Any) -> Any:
        return attend(*args, **{key: value for key, value in kwargs.items() if key in taken})

    return attention
