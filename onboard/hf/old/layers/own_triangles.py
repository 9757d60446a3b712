"""Eager attention that hides later tokens where it gets no mask, or that of padding alone, as that of
some models of transformers 4 did, and as PyTorch's attention does: code that takes layers or models
from transformers may hand it no other.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Collection, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

_FUNCTION = "eager_attention_forward"
_MODELS = "transformers.models."
_CHANGED: set[str] = set()
"""Modules whose attention does by now."""


def hide_later_tokens(code: Collection[ModuleType], *, eager: bool = False) -> list[str]:
    """Have the eager attention of models hide later tokens where its mask does not, of those whose
    attention, or what it lies in, a repository's modules have, and of modules that hand attention no
    mask at all: PyTorch's, which users get unless the config asks for `eager`, hides them then.
    Return what was changed.
    """
    taken = {each for module in code for each in vars(module).values() if _attends(each)}
    own = {module.__name__ for module in code if not eager and _hands_none(module)}
    facts = []
    for name in sorted(({each.__module__ for each in taken} | own) - _CHANGED):
        module = sys.modules[name]
        if hasattr(module, _FUNCTION):
            _CHANGED.add(name)
            setattr(module, _FUNCTION, _causal(getattr(module, _FUNCTION)))
            for cls, method in _methods_like_it(module):
                setattr(cls, method, _causal(vars(cls)[method]))
            short = name.rpartition(".")[2] if name in own else name.removeprefix(_MODELS)
            facts.append(f"eager attention of {short} hides later tokens where no mask does")
    return facts


def _hands_none(module: ModuleType) -> bool:
    """Whether a module's layers call attention, `attend(self, query, key, value, None, ...)`, with no
    mask.
    """
    if not hasattr(module, _FUNCTION) or getattr(module, "__file__", None) is None:
        return False  # what stands in for a module that is not there has no text
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        match node:
            case ast.Call(args=[ast.Name(id="self"), _, _, _, ast.Constant(value=None), *_]):
                return True
    return False


def _methods_like_it(module: ModuleType) -> Iterator[tuple[type, str]]:
    """Yield methods of a module's classes that take what its eager attention takes, and stand in its
    place (in float32, say).
    """
    taken = _arguments(getattr(module, _FUNCTION))
    own = [cls for cls in vars(module).values() if inspect.isclass(cls)]
    for cls in (cls for cls in own if cls.__module__ == module.__name__):
        for key, method in vars(cls).items():
            if inspect.isfunction(method) and _arguments(method) == taken:
                yield cls, key


def _arguments(function: Any) -> list[str]:
    """Return the names of what a function takes behind the module: queries, keys, values, a mask."""
    return list(inspect.signature(function).parameters)[1:5]


def _attends(value: Any) -> bool:
    """Whether a value is a class of a model of transformers that takes an attention mask."""
    if not (inspect.isclass(value) and issubclass(value, nn.Module)):
        return False
    if not value.__module__.startswith(_MODELS) or value.__module__ not in sys.modules:
        return False
    return "attention_mask" in inspect.signature(value.forward).parameters


def is_causal_alone(module: nn.Module) -> bool:
    """Whether a module's eager attention hides later tokens without a mask."""
    changed = any(cls.__module__ in _CHANGED for cls in type(module).__mro__)
    return changed and getattr(module, "is_causal", False) is True


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
        if query.shape[-2] > rows and getattr(module, "is_causal", False):
            hidden = _triangle(query, key.shape[-2])
            attention_mask = hidden if attention_mask is None else attention_mask + hidden
        return function(module, query, key, value, attention_mask, *args, **kwargs)

    return attention


def _triangle(query: torch.Tensor, keys: int) -> torch.Tensor:
    """Return what is added to the scores of queries [..., queries, size], [1, 1, queries, keys]; of float64
    as float32, which scores may be in whatever the queries are.
    """
    rows, dtype = query.shape[-2], query.dtype
    dtype = torch.float32 if dtype == torch.float64 else dtype
    seen = torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril(keys - rows)
    shown = torch.zeros(1, 1, rows, keys, dtype=dtype, device=query.device)
    return shown.masked_fill(~seen, torch.finfo(dtype).min)
