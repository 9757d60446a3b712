"""Expressions of a model file, and the nodes of the exported graph that have their values.

A copy of the file, in which every expression of a method that may be a tensor is marked with a
number, is exported; marks become nodes, and say which expression gave which node.
"""

from __future__ import annotations

import ast
import copy
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from onboard.graph.fx import nodes_of, replace_with

MARK = "_site"
"""What the marking function is called in the copy."""


@torch.library.custom_op("onboard_codegen::site", mutates_args=())
def _site(x: Tensor, number: int) -> Tensor:
    return x.clone()


_site.register_fake(lambda x, number: torch.empty_like(x))


def mark(number: int, value: Any) -> Any:
    """Return a value, marked if it is a tensor of numbers, or a tuple or list of such."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return torch.ops.onboard_codegen.site(value, number)
    if type(value) in (tuple, list) and all(isinstance(each, Tensor) for each in value):
        return type(value)(mark(number, each) for each in value)
    return value


@dataclass
class Site:
    """An expression in a method of the file."""

    expression: ast.expr
    """As it is in the file, with its place there."""
    function: ast.FunctionDef
    owner: str
    """The class whose method it is in."""
    nodes: list[Node] = field(default_factory=list)
    """Those that have its value, one a call; of several values, the node that makes them all."""


@dataclass
class Marked:
    """A file's text with marks."""

    text: str
    sites: list[Site]

    def assign(self, gm: GraphModule) -> None:
        """Give the sites their nodes, and take the marks off the graph."""
        for node in nodes_of(gm, torch.ops.onboard_codegen.site):
            source, number = node.args
            assert isinstance(source, Node)
            site = self.sites[int(number)]  # type: ignore[arg-type]
            made = _maker(source) if _is_split(site.expression) else source
            if made not in site.nodes:
                site.nodes.append(made)
            replace_with(node, source)

    def by_node(self) -> dict[Node, list[Site]]:
        """Return the sites of each node, the innermost first."""
        found: dict[Node, list[Site]] = defaultdict(list)
        for site in self.sites:
            for node in site.nodes:
                found[node].append(site)
        return found


def called(expression: ast.expr) -> str:
    """Return the last name of what a call calls, "" for no call."""
    function = expression.func if isinstance(expression, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else ""


def _is_split(expression: ast.expr) -> bool:
    return called(expression) in ("split", "chunk")


def _maker(node: Node) -> Node:
    """Return the node that a result is taken of."""
    source = node.args[0] if node.args else None
    taken = "getitem" in str(node.target)
    return source if taken and isinstance(source, Node) else node


def marked(text: str) -> Marked:
    """Return a model file's text with marks, and its sites with places in the text as it was."""
    tree, sites = ast.parse(text), list[Site]()
    for owner in [node for node in tree.body if isinstance(node, ast.ClassDef)]:
        for function in owner.body:
            if isinstance(function, ast.FunctionDef) and _computes(function):
                _Marking(sites, copy.deepcopy(function), owner.name).visit_body(function)
    return Marked(ast.unparse(ast.fix_missing_locations(tree)), sites)


def _computes(function: ast.FunctionDef) -> bool:
    return not function.name.startswith("__") and not function.decorator_list


class _Marking(ast.NodeTransformer):
    """Marks calls and sums: the inner ones have the lower numbers."""

    def __init__(self, sites: list[Site], function: ast.FunctionDef, owner: str) -> None:
        self._sites, self._function, self._owner = sites, function, owner

    def visit_body(self, function: ast.FunctionDef) -> None:
        function.body = [self.visit(statement) for statement in function.body]

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        return node  # what changes a tensor in place changes that tensor, no copy of it

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        return self._marked(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        return self._marked(node)

    def _marked(self, node: ast.expr) -> ast.expr:
        original = copy.deepcopy(node)
        self.generic_visit(node)
        self._sites.append(Site(original, self._function, self._owner))
        number = ast.Constant(len(self._sites) - 1)
        return ast.Call(ast.Name(MARK, ast.Load()), [number, node], [])
