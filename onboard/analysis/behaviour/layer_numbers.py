"""The layers that a model's code names by number: a small model has to have them, too.

A condition such as `if self.layer_idx == 5` is copied as it stands. What it leads to is only proven
by a model that has a layer 5.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torch import nn

from onboard.analysis.behaviour.code_numbers import code_of, literals

_COUNTED = ("range", "enumerate")


def named_layers(model: nn.Module) -> list[int]:
    """Return the numbers, sorted, that code compares a layer's index or the number of layers with,
    or takes it modulo.
    """
    lists = _lists(model)
    names = {path.rpartition(".")[2] for path in lists}  # code may ask for their length
    names |= {name for layers in lists.values() for name in _places(layers)}
    names |= {name for tree in code_of(model) for name in _loop_variables(tree)}
    return sorted({number for tree in code_of(model) for number in _compared(tree, names)})


def _lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the lists of several layers, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1
    }


def _places(layers: nn.ModuleList) -> set[str]:
    """Return the attributes that differ from layer to layer as the layers' places do."""
    found: dict[tuple[str, str], list[int]] = {}
    for place, layer in enumerate(layers):
        for path, module in layer.named_modules():
            for name, value in vars(module).items():
                if type(value) is int:
                    found.setdefault((path, name), []).append(value - place)
    return {name for (_, name), rest in found.items() if len(rest) > 1 and len({*rest}) == 1}


def _loop_variables(tree: ast.AST) -> Iterator[str]:
    """Yield what counts in the constructors' loops: a layer may get its number and not keep it."""
    for method in ast.walk(tree):
        if not isinstance(method, ast.FunctionDef) or method.name != "__init__":
            continue
        for node in ast.walk(method):
            if isinstance(node, ast.comprehension | ast.For) and _counts(node.iter):
                target = node.target.elts[0] if isinstance(node.target, ast.Tuple) else node.target
                if isinstance(target, ast.Name):
                    yield target.id


def _counts(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _COUNTED
    )


def _compared(tree: ast.AST, names: set[str]) -> Iterator[int]:
    for node in ast.walk(tree):
        is_question = isinstance(node, ast.Compare) or (
            isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)
        )
        if is_question and any(_name(inside) in names for inside in ast.walk(node)):
            yield from map(abs, literals(node))


def _name(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""
