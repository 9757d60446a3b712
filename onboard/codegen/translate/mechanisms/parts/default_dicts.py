"""`seen = defaultdict(list)`: a dict that has its entries from the beginning (`{"all": []}`) where all
their keys are constants, and else one each read of which gives an entry that is missing its first value
(`seen.setdefault(key, [])`), as long as nothing else is given the dict.
"""

from __future__ import annotations

import ast
import collections
from collections.abc import Sequence
from copy import deepcopy

from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import Global
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, call, name

_EMPTY = {"list": "[]", "dict": "{}", "int": "0", "float": "0.0", "str": "''"}
"""What builtin types are called to give."""


class DefaultDicts(Mechanism):
    """A variable that is given a `defaultdict`, and the statements behind it."""

    def instead(self, statements: Sequence[ast.stmt], frame: Frame) -> Sequence[ast.stmt] | None:
        """`seen = {"all": []}`; or `seen = {}`, and statements that read entries by `setdefault`."""
        match statements:
            case [
                ast.Assign(
                    targets=[ast.Name(id=key)],
                    value=ast.Call(func=made, args=[factory], keywords=[]),
                ) as node,
                *rest,
            ] if frame.translator.specialised and _is_defaultdict(made, frame):
                first = _first_value(factory, frame)
                if first is None:
                    return None
                if (keys := _constant_keys(key, rest)) is not None:
                    values = [deepcopy(first) for _ in keys]
                    filled = ast.Assign([name(key, store=True)], ast.Dict([*keys], values))
                    return [_at(node, filled), *rest]
                if _escapes(key, rest, isinstance(first, ast.Constant)):
                    return None
                empty = ast.Assign([name(key, store=True)], ast.Dict([], []))
                given = [_Given(key, first).visit(deepcopy(item)) for item in rest]
                return [_at(node, empty), *map(ast.fix_missing_locations, given)]
        return None


class _Given(ast.NodeTransformer):
    """Gives entries of a dict, where they are read, their first value."""

    def __init__(self, key: str, first: ast.expr) -> None:
        self.key, self.first = key, first

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """`seen[k]` is `seen.setdefault(k, first)`; what is stored stays."""
        self.generic_visit(node)
        if not _is_entry(node, self.key) or not isinstance(node.ctx, ast.Load):
            return node
        read = attribute(node.value, "setdefault")
        return ast.copy_location(call(read, node.slice, deepcopy(self.first)), node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        """`seen[k] += x` is `seen[k] = seen.setdefault(k, first) + x`."""
        if not _is_entry(node.target, self.key):
            self.generic_visit(node)
            return node
        assert isinstance(node.target, ast.Subscript)
        read = ast.Subscript(node.target.value, node.target.slice, ast.Load())
        sum_ = ast.BinOp(ast.copy_location(read, node), node.op, node.value)
        whole = ast.Assign([node.target], ast.copy_location(sum_, node))
        self.generic_visit(whole)
        return ast.copy_location(whole, node)


def _at(node: ast.stmt, made: ast.stmt) -> ast.stmt:
    return ast.fix_missing_locations(ast.copy_location(made, node))


def _constant_keys(key: str, statements: Sequence[ast.stmt]) -> list[ast.Constant] | None:
    """Return the keys of a dict that nothing asks for more than entries under constants, so that it
    may have them from the beginning; None for any other.
    """
    nodes = [node for item in statements for node in ast.walk(item)]
    entries = [x for x in nodes if isinstance(x, ast.Subscript) and _is_entry(x, key)]
    texts = {x.slice.value: x.slice for x in entries if isinstance(x.slice, ast.Constant)}
    uses = sum(isinstance(x, ast.Name) and x.id == key for x in nodes)
    plain = all(
        isinstance(x.slice, ast.Constant) and not isinstance(x.ctx, ast.Del) for x in entries
    )
    return [*texts.values()] if plain and uses == len(entries) else None


def _is_entry(node: ast.AST, key: str) -> bool:
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id == key
    )


def _is_defaultdict(made: ast.expr, frame: Frame) -> bool:
    try:
        value = frame.evaluate(made)
    except Untranslatable:
        return False
    return isinstance(value, Global) and value.obj is collections.defaultdict


def _first_value(factory: ast.expr, frame: Frame) -> ast.expr | None:
    """Return what a factory gives each time; None for one that is not known."""
    match factory:
        case ast.Name(id=kind) if (
            kind in _EMPTY and kind not in frame.env.values and kind not in frame.source.namespace
        ):
            return ast.parse(_EMPTY[kind], mode="eval").body
        case ast.Lambda(args=ast.arguments(args=[], vararg=None, kwarg=None), body=body):
            return body
    return None


def _escapes(key: str, statements: Sequence[ast.stmt], counts: bool) -> bool:
    """Whether statements do anything with a dict but read, store and list entries; adding to one in
    place is that where entries are numbers.
    """
    nodes = [node for item in statements for node in ast.walk(item)]
    known = {id(x.value) for x in nodes if _is_entry(x, key) or isinstance(x, ast.Attribute)}  # type: ignore[attr-defined]
    for node in nodes:
        match node:
            case ast.Call(func=ast.Name(id="len" | "sorted" | "list"), args=[inner]):
                known.add(id(inner))
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[inner]):
                known.add(id(inner))
            case ast.For(iter=inner):
                known.add(id(inner))
            case ast.AugAssign(target=target) if _is_entry(target, key) and not counts:
                return True
    uses = (node for node in nodes if isinstance(node, ast.Name) and node.id == key)
    return any(id(use) not in known or not isinstance(use.ctx, ast.Load) for use in uses)
