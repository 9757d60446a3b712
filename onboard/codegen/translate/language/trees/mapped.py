"""Unpacked results of a function that is mapped over several values."""

from __future__ import annotations

import ast


def each_mapped(node: ast.Assign) -> ast.expr:
    """Return `(f(x[0]), f(x[1]))` for `a, b = map(f, x)` ; other values as they are."""
    match node.targets, node.value:
        case [ast.Tuple(elts=names)], ast.Call(
            func=ast.Name(id="map"),
            args=[ast.Lambda() | ast.Name() as function, items],
            keywords=[],
        ) if not any(isinstance(each, ast.Starred) for each in names):
            parts = [
                ast.Subscript(items, ast.Constant(place), ast.Load()) for place in range(len(names))
            ]
            calls: list[ast.expr] = [ast.Call(function, [part], []) for part in parts]
            value = ast.copy_location(ast.Tuple(calls, ast.Load()), node.value)
            for call in calls:
                ast.copy_location(call, node.value)
            return ast.fix_missing_locations(value)
    return node.value
