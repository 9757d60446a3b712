"""Constructors of classes that are lists of modules, `class Experts(nn.ModuleList)` or of `nn.Sequential`,
as functions that give the items.
"""

from __future__ import annotations

import ast
from copy import deepcopy

from torch import nn

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
    apart = issubclass(cls, nn.Sequential)
    filling = [_Filling(itself, apart).visit(x) for x in node.body if not _keeps(x, itself)]
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


def one_list(given: list[ast.expr]) -> ast.expr:
    """Return the list of what `nn.Sequential` is given one by one: `*modules`, or `first, second`."""
    match given:
        case [ast.Starred(value=ast.GeneratorExp(elt=item, generators=loops))]:
            return ast.ListComp(item, loops)
        case [ast.Starred(value=modules)]:
            return modules
    return ast.List(given, ast.Load())


class _Filling(ast.NodeTransformer):
    """Puts a list of items in the place of the module that is one."""

    def __init__(self, itself: str, apart: bool) -> None:
        self.itself = itself
        self.apart = apart
        """Whether the base is given its modules one by one."""

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        """`super().__init__(modules)` gives the items, `self.append(module)` adds one, and so does
        `self.add_module(str(i), module)`.
        """
        match node.value:
            case ast.Call(
                func=ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__"),
                args=given,
                keywords=[],
            ) if len(given) <= 1 or self.apart:
                if not given:
                    return ast.Pass()
                items = one_list(given) if self.apart else given[0]
                return ast.Assign([name(_ITEMS, store=True)], items)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr="append")) as added:
                if owner == self.itself:
                    added.func = attribute(name(_ITEMS), "append")
            case (
                ast.Call(
                    func=ast.Attribute(value=ast.Name(id=owner), attr="add_module"),
                    args=[ast.Call(func=ast.Name(id="str")), module],
                ) as added
            ) if owner == self.itself:
                added.func, added.args = attribute(name(_ITEMS), "append"), [module]
        return node
