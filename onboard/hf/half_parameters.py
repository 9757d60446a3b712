"""Parameters that a constructor makes in half precision, whatever dtype the model has, its own and
those of modules of torch: code that does not mind runs in that dtype alone, so that they take the
model's, as with `from_pretrained` of transformers 4.
"""

from __future__ import annotations

import ast
import functools
import re
from typing import Any, TypeGuard

import torch

_HALVES = ("torch.bfloat16", "torch.float16", "torch.half")
TO_HALF = ("half", "bfloat16")
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
        if isinstance(target, ast.Attribute)
        and (is_halved(item.value) or any(map(_says_half, ast.walk(item.value))))
    ]
    bodies = (part for item in methods if item.name != "__init__" for part in item.body)
    others = "\n".join(map(ast.unparse, bodies))
    heeded = "|".join([_NAMED, *(rf"self\.{attr}(\.weight)?\.dtype\b" for attr in made)])
    return bool(made) and re.search(heeded, others) is None


def is_halved(node: ast.expr) -> bool:
    """Whether an expression makes a module of torch, `nn.Linear(...).half().to(device)`, that is in half
    precision then.
    """
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Call() as made, attr=attr), args=args):
            halved = attr in TO_HALF and not args
            return (halved and _makes_module(made)) or is_halved(made)
    return False


def _makes_module(node: ast.expr) -> bool:
    """Whether an expression makes a module of torch, by its class or by a function that is given it."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Call() as made)):
            return _makes_module(made)
        case ast.Call(func=function, args=args):
            return any(ast.unparse(each).startswith("nn.") for each in (function, *args[:1]))
    return False


def half_dtypes(node: ast.AST) -> list[ast.Call]:
    """Return the calls inside a call of `nn.Parameter` that are told to give half precision, or a
    call that makes a module of torch so.
    """
    match node:
        case ast.Call(func=ast.Attribute(attr="Parameter"), args=[made, *_]):
            return [call for call in ast.walk(made) if _says_half(call)]
        case ast.Call(func=ast.Attribute(value=ast.Name("nn"))) if _says_half(node):
            return [node]
    return []


def _says_half(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and any(map(is_half, node.keywords))


def is_half(keyword: ast.keyword) -> bool:
    """Whether an argument of a call is `dtype=torch.bfloat16`, or float16."""
    return keyword.arg == "dtype" and ast.unparse(keyword.value) in _HALVES


def in_models_dtype(init: Any) -> Any:
    """Have a constructor leave its own parameters, and those of modules of torch that it makes, in
    the default dtype, in which the model is made.
    """

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made = [item for item in self.children() if type(item).__module__.startswith("torch.")]
        for parameter in (item for owner in (self, *made) for item in owner._parameters.values()):
            if parameter is not None and parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.to(torch.get_default_dtype())

    return made
