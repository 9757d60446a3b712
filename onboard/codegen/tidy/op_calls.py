"""Calls of ops by keyword: what an op requires is positional, the rest has a name, and defaults are
left out.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch

import onboard.ops  # noqa: F401  (registers the ops)
from onboard.ops.library import NAMESPACE


def by_keyword(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return statements whose calls of `torch.ops.onboard` are written by their schemas; `body`
    stays as it is.
    """
    return [_ByKeyword().visit(deepcopy(statement)) for statement in body]


class _ByKeyword(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        parameters = _parameters(node.func)
        given = _given(node, parameters)
        if given is None:
            return node
        required = [item.name for item in parameters if not item.has_default_value()]
        if not given.keys() >= set(required):
            return node
        defaults = {
            item.name: item.default_value for item in parameters if item.has_default_value()
        }
        named = [
            (key, given[key])
            for key in defaults
            if key in given and not _is_value(given[key], defaults[key])
        ]
        keywords = [ast.keyword(key, value) for key, value in named]
        return ast.copy_location(
            ast.Call(node.func, [given[key] for key in required], keywords), node
        )


def _parameters(function: ast.expr) -> list[Any]:
    """Return the parameters of the op's schema; none for anything else than an op that is
    registered.
    """
    match function:
        case ast.Attribute(value=ast.Attribute() as owner, attr=op) if (
            ast.unparse(owner) == f"torch.ops.{NAMESPACE}"
        ):
            packet = getattr(getattr(torch.ops, NAMESPACE), op, None)
            return list(packet.default._schema.arguments) if packet is not None else []
    return []


def _given(node: ast.Call, parameters: Sequence[Any]) -> dict[str, ast.expr] | None:
    """Return a call's arguments by name; None where the call alone does not say which they are."""
    names = [item.name for item in parameters]
    starred = any(isinstance(item, ast.Starred) for item in node.args)
    if (
        starred
        or len(node.args) > len(names)
        or not {item.arg for item in node.keywords} <= set(names)
    ):
        return None
    return {
        **dict(zip(names, node.args, strict=False)),
        **{str(item.arg): item.value for item in node.keywords},
    }


def _is_value(node: ast.expr, value: Any) -> bool:
    """Whether a node is the literal of a value of the same type: neither 1 nor 1.0 stands for
    True.
    """
    try:
        return repr(ast.literal_eval(node)) == repr(value)
    except ValueError:
        return False
