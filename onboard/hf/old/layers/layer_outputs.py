"""Decoder layers of transformers as they were before 4.54: they give a tuple, the hidden states first.

A class of a repository whose forward takes them so, `layer(...)[0]`, has such layers; others have
what transformers gives them.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache, wraps
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from onboard.hf.parsed_code import parsed_code

_LAYERS = "transformers.models."


class _GivingTuples:
    """Laid over a class of layers of transformers."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor]:
        """Return what the layer gives, in a tuple."""
        return (super().forward(*args, **kwargs),)  # type: ignore[misc]


def give_tuples(package: str) -> list[str]:
    """Have the modules of a package, and those of transformers whose models their classes inherit
    from, make layers that give tuples where the package's own forwards take them so; return what was
    given.
    """
    own = [module for key, module in sys.modules.items() if key.startswith(f"{package}.")]
    taking = [cls for module in own for cls in _classes(module) if _takes_apart(cls)]
    homes = {sys.modules[base.__module__] for cls in taking for base in cls.__mro__}
    given = {each for home in homes for each in _give(home) if home in own or _is_theirs(home)}
    return [
        f"{name} gives a tensor now; a stand-in gives a tuple, as before 4.54"
        for name in sorted(given)
    ]


def _give(home: ModuleType) -> Iterator[str]:
    """Put layers that give tuples in the place of a module's, one by one."""
    for name, cls in list(vars(home).items()):
        if _is_of(cls, GradientCheckpointingLayer) and _gives_tensor(cls):
            setattr(home, name, giving_tuples(cls))
            yield cls.__name__


def _classes(module: ModuleType) -> Iterator[type[nn.Module]]:
    """Yield a module's own classes that have a forward of their own."""
    for cls in vars(module).values():
        if _is_of(cls, nn.Module) and cls.__module__ == module.__name__ and "forward" in vars(cls):
            yield cls


def _is_of(cls: Any, base: type) -> bool:
    return isinstance(cls, type) and issubclass(cls, base)


def _is_theirs(home: ModuleType) -> bool:
    return home.__name__.startswith(_LAYERS)


@cache
def giving_tuples(cls: Any) -> Any:
    """Return a class of layers as it was; arguments have the names that they have there."""

    @wraps(_GivingTuples.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor]:
        return _GivingTuples.forward(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    members = {"__module__": cls.__module__, "forward": forward}
    return type(f"{cls.__name__}Tuple", (_GivingTuples, cls), members)


def _gives_tensor(cls: Any) -> bool:
    """Whether a class of layers is transformers' own, and gives a tensor."""
    given = inspect.signature(cls.forward).return_annotation
    is_theirs = cls.__module__.startswith(_LAYERS) and not issubclass(cls, _GivingTuples)
    return is_theirs and given in (torch.Tensor, "torch.Tensor")


def _takes_apart(cls: type[nn.Module]) -> bool:
    """Whether the forward of a class takes the first item of what it calls the layers of a loop for,
    also in a function inside that it hands them to, or a layer that its constructor makes.
    """
    tree = _tree(cls.forward)
    loops = [item for item in ast.walk(tree) if isinstance(item, ast.For)]
    layers = [(item, _named(item.target) | _picked(item)) for item in loops]
    inside = [pair for loop, own in layers for pair in _handed(tree, loop, own)]
    return any(_takes_first(*pair) for pair in (*layers, *inside, (tree, _made_layers(cls))))


def _picked(loop: ast.AST) -> set[str]:
    """Return the names of what a loop takes from lists of the model, `self.x[i]`."""
    pairs = (
        pair
        for item in ast.walk(loop)
        if isinstance(item, ast.Assign)
        for target in item.targets
        for pair in _paired(target, item.value)
    )
    return {
        ast.unparse(target)
        for target, value in pairs
        if isinstance(value, ast.Subscript) and ast.unparse(value.value).startswith("self.")
    }


def _paired(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(target, value)]


def _handed(tree: ast.AST, loop: ast.AST, own: set[str]) -> Iterator[tuple[ast.AST, set[str]]]:
    """Yield the functions inside that a loop hands one of these to, with the names of the parameters
    that get it.
    """
    functions = {
        item.name: item
        for item in ast.walk(tree)
        if isinstance(item, ast.FunctionDef) and item is not getattr(tree, "body", [None])[0]
    }
    for call in ast.walk(loop):
        if isinstance(call, ast.Call) and (inside := functions.get(ast.unparse(call.func))):
            named = [parameter.arg for parameter in inside.args.args]
            given = [*zip(named, call.args, strict=False)]
            given += [(each.arg or "", each.value) for each in call.keywords]
            yield inside, {name for name, value in given if ast.unparse(value) in own}


def _tree(function: Any) -> ast.AST:
    return parsed_code(inspect.unwrap(function))


def _made_layers(cls: type[nn.Module]) -> set[str]:
    """Return `self.x` of each layer of transformers that a class's own constructor makes."""
    if "__init__" not in vars(cls):
        return set()
    names = vars(sys.modules[cls.__module__])
    return {
        ast.unparse(target)
        for item in ast.walk(_tree(cls.__init__))
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Call)
        if _is_of(made := names.get(ast.unparse(item.value.func)), GradientCheckpointingLayer)
        and _gives_tensor(made)
        for target in item.targets
    }


def _takes_first(body: ast.AST, own: set[str]) -> bool:
    """Whether code takes the first item of what it calls one of these for."""
    given = {
        ast.unparse(target)
        for item in ast.walk(body)
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Call)
        if _calls(item.value, own) or own & _named(item.value)
        for target in item.targets
    }
    return any(
        isinstance(item, ast.Subscript)
        and ast.unparse(item.slice) == "0"
        and (ast.unparse(item.value) in given or _calls(item.value, own))
        for item in ast.walk(body)
    )


def _calls(expr: ast.expr, own: set[str]) -> bool:
    return isinstance(expr, ast.Call) and ast.unparse(expr.func) in own


def _named(expr: ast.expr) -> set[str]:
    return {item.id for item in ast.walk(expr) if isinstance(item, ast.Name)}
