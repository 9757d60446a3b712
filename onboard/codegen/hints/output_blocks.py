"""Blocks of a linear layer's outputs, as splits behind it tell them, and what the file calls their
sizes.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from onboard.codegen.hints.marked_sites import Site, called
from onboard.graph.fx import arguments, is_op
from onboard.graph.sharding.reshaped_cuts import sizes_of
from onboard.graph.sharding.signatures import shape, signature

aten = torch.ops.aten
_SPLITS = (aten.split_with_sizes, aten.split, aten.chunk)
_RESHAPES = (aten.view, aten.reshape, aten.unflatten)
Sites = Mapping[Node, list[Site]]


@dataclass(frozen=True)
class Block:
    """Outputs that are cut by themselves, in runs of `unit`."""

    size: int
    code: str
    """The expression of the size; "" where the file has none that can be had."""
    unit: int = 1
    unit_code: str = "1"


def blocks_of(node: Node, size: int, site: Site, sites: Sites) -> list[Block]:
    """Return the blocks of the outputs of a linear layer, which are one where nothing splits them."""
    call = site.expression
    is_module = isinstance(call, ast.Call) and len(call.args) == 1
    code = f"{ast.unparse(call.func)}.out_features" if is_module else ""  # type: ignore[attr-defined]
    return list(_blocks(node, Block(size, code), site, sites))


def _blocks(node: Node, block: Block, site: Site, sites: Sites) -> Iterator[Block]:
    end = _followed(node)
    readers = [user for user in end.users if user.users]
    split = next((each for each in readers if is_op(each, *_SPLITS)), None)
    if len(readers) == 1 and split is not None and _splits_last(split):
        codes = _codes(split, block, site, sites)
        for index, piece in enumerate(split.meta["val"]):
            taken = [user for user in split.users if user.args[1:] == (index,)]
            own = Block(int(sizes_of(piece)[-1]), codes[index] if codes else "")
            yield from _blocks(taken[0], own, site, sites) if taken else [own]
        return
    heads = next((each for each in readers if is_op(each, *_RESHAPES)), None)
    unit = _unit(end, heads, block, site, sites) if heads is not None else None
    yield block if unit is None else Block(block.size, block.code, *unit)


def _followed(node: Node) -> Node:
    """Return what a value is behind ops that keep every entry where it is."""
    while len(node.users) == 1:
        [user] = node.users
        tensors = [each for each in user.all_input_nodes if hasattr(each.meta.get("val"), "shape")]
        same = hasattr(user.meta.get("val"), "shape") and shape(user) == shape(node)
        if not same or signature(user) is None or tensors[0] is not node:
            return node
        if any(each.op != "get_attr" for each in tensors[1:]) or is_op(user, *_RESHAPES):
            return node
        node = user
    return node


def _splits_last(split: Node) -> bool:
    source, values = split.all_input_nodes[0], arguments(split)
    last = len(shape(source)) - 1
    return bool(values["dim"] % (last + 1) == last)


def _codes(split: Node, block: Block, site: Site, sites: Sites) -> list[str] | None:
    """Return the expressions of the sizes of a split's pieces, None where one cannot be had."""
    count = len(split.meta["val"])
    for each in sites.get(split, []):
        call = each.expression
        if each.owner != site.owner or not isinstance(call, ast.Call) or not _name_is_split(call):
            continue
        if called(call) == "chunk":
            return [f"{block.code} // {count}"] * count if block.code else None
        sizes = _argument(call, "split_size_or_sections")
        if isinstance(sizes, ast.Tuple | ast.List) and len(sizes.elts) == count:
            found = [_had(element, each.function) for element in sizes.elts]
            return None if None in found else [code for code in found if code is not None]
        code = _had(sizes, each.function) if sizes is not None else None
        return [code] * count if code else None
    return None


def _name_is_split(call: ast.Call) -> bool:
    return called(call) in ("split", "chunk")


def _argument(call: ast.Call, name: str) -> ast.expr | None:
    """Return the first argument of a method behind its tensor; a function has the tensor first."""
    assert isinstance(call.func, ast.Attribute)
    place = 1 if ast.unparse(call.func.value) == "torch" else 0
    named = [each.value for each in call.keywords if each.arg == name]
    return call.args[place] if len(call.args) > place else next(iter(named), None)


def _unit(
    node: Node, heads: Node, block: Block, site: Site, sites: Sites
) -> tuple[int, str] | None:
    """Return the entries of one of the heads that a reshape makes, and what the file calls them."""
    before, behind = shape(node), shape(heads)
    unit = behind[-1]
    if len(behind) != len(before) + 1 or not isinstance(unit, int) or block.size % unit:
        return None
    for each in sites.get(heads, []):
        call = each.expression
        if each.owner != site.owner or not isinstance(call, ast.Call):
            continue
        parts = shape_parts(call, each.function)
        code = _had(parts[-1], each.function) if parts else None
        if code is not None and code != "-1":
            return unit, code
    return None


def shape_parts(call: ast.Call, function: ast.FunctionDef) -> list[ast.expr]:
    """Return what a call of view, reshape or unflatten says of the shape."""
    if called(call) not in ("view", "reshape", "unflatten") or not call.args:
        return []
    given = call.args[1:] if called(call) == "unflatten" else call.args
    if len(given) > 1:
        return list(given)
    [only] = given
    if isinstance(only, ast.Name):
        only = _assigned(only.id, function) or only
    return list(only.elts) if isinstance(only, ast.Tuple | ast.List) else []


def shape_given(call: ast.expr) -> list[ast.expr]:
    """Return the sizes that a call of view or reshape has in its own text."""
    given = call.args if isinstance(call, ast.Call) else []
    if len(given) == 1:
        return list(given[0].elts) if isinstance(given[0], ast.Tuple | ast.List) else []
    return list(given)


def _assigned(name: str, function: ast.FunctionDef) -> ast.expr | None:
    """Return what the only assignment of a variable gives it."""
    arguments = {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)}
    stores = [
        each
        for each in ast.walk(function)
        if isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, ast.Store)
    ]
    if len(stores) != 1 or name in arguments:
        return None
    for each in ast.walk(function):
        if isinstance(each, ast.Assign) and each.targets == stores:
            return each.value
    return None


def _had(code: ast.expr, function: ast.FunctionDef) -> str | None:
    """Return an expression as one of attributes and numbers alone, which the whole class has; None
    where it is none.
    """
    found = _Inlining(function).visit(copy.deepcopy(code))
    allowed = (
        *(ast.Attribute, ast.Constant, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop),
        ast.expr_context,
    )
    for part in ast.walk(found):
        is_self = isinstance(part, ast.Name) and part.id == "self"
        if not (is_self or isinstance(part, allowed)):
            return None
    return ast.unparse(found)


class _Inlining(ast.NodeTransformer):
    def __init__(self, function: ast.FunctionDef) -> None:
        self.function = function

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = _assigned(node.id, self.function)
        return node if value is None else self.visit(copy.deepcopy(value))
