"""PyTorch's modules as one makes them: what a constructor requires is positional, defaults are left
out.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence, Set
from copy import deepcopy
from typing import Any

from torch import nn

_SHAPED_BY = {"Conv1d": ("in_channels", "out_channels", "kernel_size", "groups", "bias")}
"""Arguments that the weights of a module depend on."""
_WEIGHTS = {"weight", "bias"}


def with_plain_modules(body: Sequence[ast.stmt], asked: Mapping[str, Set[str]]) -> list[ast.stmt]:
    """Return statements whose calls like `nn.Conv1d(...)` name only what may be left out, and is
    not the default; `body` stays as it is.

    `asked`: what code asks of the modules by their attributes, as `asked_of` says; one that is
    asked for its weights alone is made without what these do not depend on.
    """
    return [_Plain(asked).visit(deepcopy(statement)) for statement in body]


def asked_of(trees: Sequence[ast.AST]) -> dict[str, set[str]]:
    """Return which attributes code reads of each attribute; "" where it does anything else with
    it.
    """
    asked: dict[str, set[str]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load):
                    read = node.attr if isinstance(node, ast.Attribute) else ""
                    asked.setdefault(child.attr, set()).add(read)
    return asked


class _Plain(ast.NodeTransformer):
    def __init__(self, asked: Mapping[str, Set[str]]) -> None:
        self.asked = asked

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        self.generic_visit(node)
        match node:
            case ast.Assign(
                targets=[ast.Attribute(value=ast.Name(id="self"), attr=attr)],
                value=ast.Call(func=ast.Attribute(value=ast.Name(id="nn"), attr=kind)) as made,
            ) if kind in _SHAPED_BY and self.asked.get(attr, set()) <= _WEIGHTS:
                needed = _SHAPED_BY[kind]
                made.keywords = [item for item in made.keywords if item.arg in needed]
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        parameters = _parameters(node.func)
        given = {item.arg: item.value for item in node.keywords}
        if not parameters or None in given:
            return node
        args = list(node.args)
        for item in parameters[len(args) :]:
            if item.default is not item.empty or item.name not in given:
                break
            args.append(given.pop(item.name))
        defaults = {item.name: item.default for item in parameters}
        keywords = [
            ast.keyword(key, value)
            for key, value in given.items()
            if not _is_constant(value, defaults.get(str(key)))
        ]
        return ast.copy_location(ast.Call(node.func, args, keywords), node)


def parameters_of(function: ast.expr) -> list[str]:
    """Return the names of the parameters of a module's constructor; none for anything else."""
    return [item.name for item in _parameters(function)]


def _parameters(function: ast.expr) -> list[inspect.Parameter]:
    """Return the parameters of a module's constructor; none for anything else."""
    match function:
        case ast.Attribute(value=ast.Name(id="nn"), attr=attr):
            cls = getattr(nn, attr, None)
            if isinstance(cls, type) and issubclass(cls, nn.Module):
                return list(inspect.signature(cls).parameters.values())
    return []


def _is_constant(node: ast.expr, value: Any) -> bool:
    return isinstance(node, ast.Constant) and (type(node.value), node.value) == (type(value), value)
