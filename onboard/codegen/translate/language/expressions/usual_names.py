"""PyTorch's names as generated files write them, whatever a repository's file imports them as."""

from __future__ import annotations

import ast
import math
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from onboard.codegen.translate.language.trees.syntax import attribute, name

_MODULES: dict[str, ModuleType] = {"torch": torch, "nn": nn, "F": F, "math": math}

_OF_NUMPY = {
    **dict.fromkeys(("pi", "e", "inf", "sqrt", "log", "log2", "log10", "exp", "cos", "sin"), math),
    **dict.fromkeys(("arange", "float32", "float64", "int64"), torch),
}
"""What constructors compute with numpy -> the module that has it for numbers or as a tensor."""


def usual_item(module: object, attr: str) -> tuple[Any, ast.expr] | None:
    """Return what generated files have in place of an item of numpy, and its name; None for items
    of other modules.
    """
    is_numpy = isinstance(module, ModuleType) and module.__name__ == "numpy"
    if not is_numpy or attr not in _OF_NUMPY:
        return None
    return getattr(module, attr), attribute(name(_OF_NUMPY[attr].__name__), attr)


def usual_name(obj: Any, identifier: str) -> ast.expr | None:
    """Return `torch.cat` for what a file calls `cat`, and `nn` for `torch.nn`; None for what is of
    none of these modules.
    """
    for key, module in _MODULES.items():
        if obj is module:
            return name(key)
    if isinstance(obj, ModuleType):  # these modules have others that they import
        return None
    for own in (identifier, str(getattr(obj, "__name__", identifier))):
        for key, module in _MODULES.items():
            if getattr(module, own, None) is obj:
                return attribute(name(key), own)
    return None
