"""Parameters that a constructor makes in half precision, whatever dtype the model has: code that
does not mind runs in that dtype alone, so that they take the model's, as with `from_pretrained` of
transformers 4.
"""

from __future__ import annotations

import ast
import functools
import re
from typing import Any

import torch

_HALVES = ("torch.bfloat16", "torch.float16", "torch.half")
_NAMED = r"float16|\bhalf\b"


def takes_models_dtype(node: ast.ClassDef) -> bool:
    """Whether a class makes such parameters, and its methods do not heed their dtype: they name no
    half precision, and do not ask for `self.parameter.dtype`.
    """
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    stored = [item for item in ast.walk(node) if isinstance(item, ast.Assign)]
    made = [
        target.attr
        for item in stored
        for target in item.targets
        if isinstance(target, ast.Attribute) and any(map(half_dtypes, ast.walk(item.value)))
    ]
    others = "\n".join(ast.unparse(item) for item in methods if item.name != "__init__")
    heeded = "|".join([_NAMED, *(rf"self\.{attr}\.dtype\b" for attr in made)])
    return bool(made) and re.search(heeded, others) is None


def half_dtypes(node: ast.AST) -> list[ast.Call]:
    """Return the calls inside a call of `nn.Parameter` that are told to give half precision."""
    match node:
        case ast.Call(func=ast.Attribute(attr="Parameter"), args=[made, *_]):
            calls = [item for item in ast.walk(made) if isinstance(item, ast.Call)]
            return [call for call in calls if any(map(is_half, call.keywords))]
    return []


def is_half(keyword: ast.keyword) -> bool:
    """Whether an argument of a call is `dtype=torch.bfloat16`, or float16."""
    return keyword.arg == "dtype" and ast.unparse(keyword.value) in _HALVES


def in_models_dtype(init: Any) -> Any:
    """Have a constructor leave its own parameters in the default dtype, in which the model is
    made.
    """

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for parameter in self._parameters.values():
            if parameter is not None and parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.to(torch.get_default_dtype())

    return made
