"""Helper functions that this config's model never calls and another's may: tried with what one like
them was given.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch

from onboard.analysis.recognise import REFUSED
from onboard.analysis.recognise.bounds.value_guards import guarded
from onboard.analysis.recognise.recorder import FunctionCall
from onboard.analysis.source import module_source


def with_uncalled(
    calls: Sequence[FunctionCall], wanted: Callable[[FunctionCall], Any]
) -> Iterator[FunctionCall]:
    """Yield the calls, then for each `wanted` one those of its module's other functions that take
    the same.
    """
    yield from calls
    tried = {(call.module, call.name) for call in calls}
    for call in calls:
        others = _alike(call) if call.module in sys.modules and wanted(call) else {}
        for name, function in others.items():
            if (call.module, name) not in tried:
                outputs, bounds = guarded(partial(_outputs, function, call))
                if outputs is not None:
                    yield replace(call, name=name, outputs=outputs, called=False, guarded=bounds)
            tried.add((call.module, name))


def _alike(call: FunctionCall) -> dict[str, Callable[..., Any]]:
    """Return the functions of a call's module that want what it gives, and that the module's code
    mentions.
    """
    found = dict(inspect.getmembers(sys.modules[call.module], inspect.isfunction))
    read = _names(module_source(call.module).tree)
    required = _required(found[call.name]) if call.name in found else None
    own = {
        name: function
        for name, function in found.items()
        if name in read and function.__module__ == call.module
    }
    return {name: function for name, function in own.items() if _required(function) == required}


@lru_cache(maxsize=64)
def _names(tree: ast.Module) -> frozenset[str]:
    """Return the names in a module's code, of which each of its functions is asked."""
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


def _required(function: Callable[..., Any]) -> list[str]:
    """Return the parameters that every call gives."""
    return [
        name
        for name, item in inspect.signature(function).parameters.items()
        if item.default is item.empty
    ]


def _outputs(function: Callable[..., Any], call: FunctionCall) -> list[torch.Tensor] | None:
    """Return what a function gives for a call's arguments; None for anything else than tensors."""
    try:
        with torch.no_grad():
            found = function(*(argument.clone() for argument in call.arguments), *call.flags)
    except REFUSED:  # it is not made for these
        return None
    outputs = list(found) if isinstance(found, tuple) else [found]
    return outputs if all(isinstance(item, torch.Tensor) for item in outputs) else None
