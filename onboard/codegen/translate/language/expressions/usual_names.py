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


def usual_name(obj: Any, identifier: str) -> ast.expr | None:
    """Return `torch.cat` for what a file calls `cat`, and `nn` for `torch.nn`; None for what is of
    none of these modules.
    """
    for key, module in _MODULES.items():
        if obj is module:
            return name(key)
    for own in (identifier, str(getattr(obj, "__name__", identifier))):
        for key, module in _MODULES.items():
            if getattr(module, own, None) is obj:
                return attribute(name(key), own)
    return None
