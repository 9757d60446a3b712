"""Methods with which a constructor gives parameters their first values, which checkpoints have
others for, or their names.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping
from typing import Any

from onboard.analysis.source import find_method, module_source
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.statements.assignments.kept import is_weight
from onboard.codegen.translate.language.statements.assignments.own_attributes import store_attribute
from onboard.codegen.translate.language.statements.bindings import SAYING
from onboard.codegen.translate.language.values import NONE, Code, Known, Value

_FIRST_VALUES = ("torch.nn.init", "transformers.initialization")
_ARITHMETIC = ("math", "builtins", "torch.autograd.grad_mode")
_LOOKING = ("named_parameters", "parameters", "named_modules", "modules", "children", "items")
"""Methods that only tell what a module has."""
_WEIGHTS = ("data", "weight", "bias")
"""What a method changes in place that gives first values."""


class Initialised(Mechanism):
    """`self.reset_parameters()`, and `self.layer.weight.data.zero_()`."""

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """Nothing, where a method works in place on a parameter, or a part of one."""
        if not (isinstance(owner, Code) and attr.endswith("_")) or attr.endswith("__"):
            return None
        whole = owner.expr
        while isinstance(whole, ast.Subscript):
            whole = whole.value
        return NONE if is_weight(whole, frame) else None

    def call_own_method(self, attr: str, args: Args, frame: Frame) -> Value | None:
        """Nothing, where the method does nothing else; an attribute, for `register_parameter`."""
        if frame.kind != "init" or frame.cls is None or not frame.translator.specialised:
            return None
        match attr, args.positional:
            case "register_parameter", [Known(value=str() as key), value]:
                store_attribute(key, value, frame, None)
                return NONE
        found = find_method(frame.cls.cls, attr)
        if found is None or found[0].__module__.startswith(("torch.", "transformers.")):
            return None
        namespace = module_source(found[0].__module__).namespace
        nothing = _only_says(found[1]) or _only_initialises(found[1], namespace)
        return NONE if nothing else None


def _only_initialises(node: ast.FunctionDef, namespace: Mapping[str, Any]) -> bool:
    """Whether a method calls functions of `torch.nn.init` or changes weights in place, and else works
    out numbers for that, or looks for weights.
    """
    inside = [item for statement in node.body for item in ast.walk(statement)]
    for item in inside:
        match item:
            case ast.Return(value=ast.expr()) | ast.Raise() | ast.FunctionDef():
                return False
            case ast.Attribute(ctx=context) | ast.Subscript(ctx=context):
                if not isinstance(context, ast.Load):
                    return False
    modules = set(_modules_called(inside, namespace))
    return bool(modules & set(_FIRST_VALUES)) and modules <= {*_FIRST_VALUES, *_ARITHMETIC}


def _only_says(node: ast.FunctionDef) -> bool:
    """Whether a method gives nothing and stores nothing, calls none of the module's own methods, and
    does nothing with what it works out but say it.
    """
    inside = [item for statement in node.body for item in ast.walk(statement)]
    for item in inside:
        match item:
            case ast.Return(value=ast.expr()) | ast.Yield() | ast.FunctionDef() | ast.Delete():
                return False
            case ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store()):
                return False
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"))) | ast.Global():
                return False
            case ast.Expr(value=ast.Call() as call) if not ast.unparse(call).startswith(SAYING):
                return False
    return any(isinstance(item, ast.Expr) and isinstance(item.value, ast.Call) for item in inside)


def _modules_called(nodes: list[ast.AST], namespace: Mapping[str, Any]) -> Iterator[str | None]:
    """Yield the module of each function that is called; None for one that is not known."""
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=owner), attr=attr)) if (
                owner in _WEIGHTS and attr.endswith("_") and not attr.endswith("__")
            ):
                yield _FIRST_VALUES[0]
            case ast.Call(func=ast.Attribute(attr=attr), args=[]) if attr in _LOOKING:
                continue
            case ast.Call(func=function):
                yield _module_of(function, {**vars(builtins), **namespace})


def _module_of(function: ast.expr, names: Mapping[str, Any]) -> str | None:
    match function:
        case ast.Name(id=key):
            found = names.get(key)
        case _:
            dotted = ast.unparse(function).split(".")
            found = names.get(dotted[0])
            for part in dotted[1:]:
                found = getattr(found, part, None)
    return getattr(found, "__module__", None)
