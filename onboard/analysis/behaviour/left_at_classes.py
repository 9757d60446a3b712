"""What layers of a text leave at their classes for the layers behind them, and what the constructor
of a model's first module leaves there for the others.
"""

from __future__ import annotations

import ast
import functools
import sys
from typing import Any

import torch
from torch import nn

from onboard.analysis.source import class_node

BETWEEN_LAYERS = "between_layers"
"""The parameter of generated blocks that has it: a dict, with a name for each class and attribute."""


def place_of(cls: type, attr: str) -> str:
    """Return the name in that dict of an attribute of a class."""
    return f"{cls.__name__}.{attr}"


def left_at_classes(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return what is left now at the classes of a module and of its parts."""
    return {
        place_of(cls, attr): value.clone()
        for cls in {type(part) for part in module.modules()}
        for attr, value in vars(cls).items()
        if isinstance(value, torch.Tensor)
    }


@functools.cache
def made_once(cls: type) -> frozenset[str]:
    """Return the attributes of a class, None at first, that its constructor assigns by the class's
    name.
    """
    node = class_node(cls)
    constructors = [
        item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"
    ]
    stored = [
        item.attr
        for constructor in constructors
        for item in ast.walk(constructor)
        if isinstance(item, ast.Attribute)
        and isinstance(item.ctx, ast.Store)
        and ast.unparse(item.value) == cls.__name__
    ]
    return frozenset(stored) & frozenset(_nothing_at_first(node))


def _nothing_at_first(node: ast.ClassDef) -> list[str]:
    """Return the names that a class gives None in its body."""
    found = []
    for item in node.body:
        match item:
            case (
                ast.Assign(targets=[ast.Name(id=attr)], value=ast.Constant(value=None))
                | ast.AnnAssign(target=ast.Name(id=attr), value=ast.Constant(value=None))
            ):
                found.append(attr)
    return found


def make_anew(package: str, model_class: Any) -> list[str]:
    """Have each model of a class find nothing that constructors of an earlier one have left at the
    package's classes; return what to say of it.
    """
    modules = [item for name, item in sys.modules.items() if name.startswith(f"{package}.")]
    found = {
        value for module in modules for value in vars(module).values() if _is_own(value, package)
    }
    kept = {cls: made_once(cls) for cls in found if made_once(cls)}
    if not kept:
        return []
    init = model_class.__init__

    @functools.wraps(init)
    def anew(self: Any, *args: Any, **kwargs: Any) -> None:
        for cls, attributes in kept.items():
            for attr in attributes:
                setattr(cls, attr, None)
        init(self, *args, **kwargs)

    model_class.__init__ = anew
    names = sorted(
        f"{cls.__name__}.{attr}" for cls, attributes in kept.items() for attr in attributes
    )
    return [f"{', '.join(names)}: of the first model in the code, and of each model here"]


def _is_own(value: object, package: str) -> bool:
    return (
        isinstance(value, type)
        and issubclass(value, nn.Module)
        and value.__module__.startswith(f"{package}.")
    )
