"""Code that puts tensors on a GPU by its name (`device="cuda"`, `.cuda()`): generated code has them where
what it is given is. Constructors say nothing of it, see `without_gpus`.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import torch

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.expressions.calls import call_value
from onboard.codegen.translate.language.expressions.tensor_methods import tensor_method
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import Global
from onboard.codegen.translate.language.trees.casts import is_gpu
from onboard.codegen.translate.language.trees.syntax import attribute
from onboard.codegen.translate.language.values import Code, Known, Value

_DEVICE = "device"
_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "tensor", "zeros")


class GpuNames(Mechanism):
    """Names of GPUs, and what is put on one."""

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """`torch.cuda.current_device()`, and functions that make tensors on a GPU."""
        if function is torch.cuda.current_device:
            return Known("cuda")
        if not _is_named(args.keywords.get(_DEVICE)) or (here := _device(frame)) is None:
            return None
        placed = replace(args, keywords={**args.keywords, _DEVICE: here})
        return call_value(Global(function, expr), placed, frame)

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """`x.cuda()`, `x.to("cuda", ...)`."""
        if not isinstance(owner, Code) or frame.kind == "init" or owner.static:
            return None
        if attr == "cuda":
            return _placed(owner, frame)
        others = {key: item for key, item in args.keywords.items() if not _is_named(item)}
        rest = [item for item in args.positional if not _is_named(item)]
        if attr != "to" or len(others) + len(rest) == len(args.keywords) + len(args.positional):
            return None
        placed = _placed(owner, frame)
        return tensor_method(placed, attr, Args(rest, others, [])) if rest or others else placed


def _is_named(value: Value | None) -> bool:
    """Whether a value is the name of a GPU, or a device of that name."""
    plain = isinstance(value, Known) or type(value) is Code
    return value is not None and plain and not _is_none(value) and is_gpu(value.code())


def _is_none(value: Value) -> bool:
    return isinstance(value, Known) and value.value is None


def _device(frame: Frame) -> Code | None:
    """Return where the first tensor lies that a function is given; None in a constructor."""
    if frame.kind == "init":
        return None
    for key, value in frame.env.values.items():
        match value:
            case Code(expr=ast.Name(id=given), static=False, optional=False) if given == key:
                return Code(attribute(value.expr, _DEVICE))
    return None


def _placed(tensor: Code, frame: Frame) -> Code:
    """Return a tensor where the others are: what is made here is told so, all else is there."""
    match tensor.expr:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=attr) as made) if (
            attr in _FACTORIES and (here := _device(frame)) is not None
        ):
            told = [item for item in tensor.expr.keywords if item.arg != _DEVICE]
            told.append(ast.keyword(_DEVICE, here.code()))
            return replace(tensor, expr=ast.Call(made, tensor.expr.args, told))
    return tensor
