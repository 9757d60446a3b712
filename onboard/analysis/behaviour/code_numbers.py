"""The code that a model runs, and the whole numbers that stand in it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from torch import nn
from transformers import PretrainedConfig

from onboard.analysis.recognise.recorder import modeling_modules
from onboard.analysis.source import module_source
from onboard.hf.config_layers import read_layers

_SMALLEST = 2
"""Numbers up to it are in all code."""


def code_of(model: nn.Module) -> Iterator[ast.AST]:
    """Yield the classes of a model's own modules, with those that they inherit from, and all
    functions beside them.
    """
    used = {cls.__qualname__ for module in model.modules() for cls in type(module).__mro__}
    for name in modeling_modules(model):
        source = module_source(name)
        yield from (node for key, node in source.classes.items() if key in used)
        yield from (
            node
            for key, node in source.functions.items()
            if inspect.isfunction(source.namespace.get(key))
        )


def constants_of(model: nn.Module) -> Iterator[ast.AST]:
    """Yield the values that the modules of a model's code give names, beside its classes."""
    for name in modeling_modules(model):
        for node in module_source(name).tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                yield node.value


def literals(*nodes: ast.AST) -> Iterator[int]:
    """Yield the whole numbers that are written somewhere below nodes."""
    for node in (inside for each in nodes for inside in ast.walk(each)):
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(
                value, bool
            ) and value == int(value):
                yield int(value)


def same_sizes(
    model: nn.Module, small: PretrainedConfig, whole: PretrainedConfig
) -> dict[str, int]:
    """Return the sizes of configs that are the same in the small `model` and in the whole one, as far
    as code reads them; the smallest and the number of layers are none.

    What such a size leads to cannot be told from a number that the code has.
    """
    nodes = (node for tree in code_of(model) for node in ast.walk(tree))
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    layers = read_layers(whole, vars(whole))
    return {
        key: value
        for key, value in vars(whole).items()
        if type(value) is int and value > _SMALLEST and vars(small).get(key) == value
        if key in read and (layers is None or key != layers.key)
    }
