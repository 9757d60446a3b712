"""Constructors of classes that are lists of modules, `class Experts(nn.ModuleList)`, as functions that
give the items.
"""

from __future__ import annotations

import ast
from copy import deepcopy

from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, name

_ITEMS = "_items"


def items_of_list(cls: type, constructor: ast.FunctionDef) -> ast.FunctionDef:
    """Return the function that gives the items with which a constructor fills the list; what it
    keeps besides is left out.

    Raises:
        Untranslatable: it does something else with the list.
    """
    node = deepcopy(constructor)
    itself = node.args.args.pop(0).arg
    filling = [_Filling(itself).visit(item) for item in node.body if not _keeps(item, itself)]
    node.body = [*ast.parse(f"{_ITEMS} = []").body, *filling, ast.Return(name(_ITEMS))]
    names = {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
    if names & {itself, "super"}:
        raise Untranslatable(f"the constructor of {cls.__name__}, a list of modules")
    return ast.fix_missing_locations(node)


def _keeps(statement: ast.stmt, itself: str) -> bool:
    """Whether a statement is `self.attribute = ...`, of what is no item of the list."""
    match statement:
        case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=owner))]):
            return owner == itself
    return False


class _Filling(ast.NodeTransformer):
    """Puts a list of items in the place of the module that is one."""

    def __init__(self, itself: str) -> None:
        self.itself = itself

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        """`super().__init__(modules)` gives the items, `self.append(module)` adds one."""
        match node.value:
            case ast.Call(
                func=ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__"),
                args=given,
                keywords=[],
            ) if len(given) <= 1:
                return ast.Assign([name(_ITEMS, store=True)], given[0]) if given else ast.Pass()
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr="append")) as added:
                if owner == self.itself:
                    added.func = attribute(name(_ITEMS), "append")
        return node
