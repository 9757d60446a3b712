"""Objects of plain classes that modules of repositories' code keep, helpers for RoPE say: what their
methods do is written where they are called, and what they keep becomes the module's own.
"""

from __future__ import annotations

import ast
from copy import deepcopy
from dataclasses import replace
from typing import Any

from onboard.analysis.source import find_method, module_source
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.object_values import PlainObject, Self
from onboard.codegen.translate.language.program.closures import run_inside
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, name
from onboard.codegen.translate.language.values import Value


def make_object(made: PlainObject, attr: str, frame: Frame) -> PlainObject:
    """Write what the constructor does into that of the module that keeps the object as `attr`."""
    kept = replace(made, attr=attr)
    frame.env.values[f"self.{attr}"] = kept
    call_object(kept, "__init__", made.arguments, frame)
    return kept


def call_object(owner: PlainObject, attr: str, args: Args, frame: Frame) -> Value:
    """Return what a method gives, run where it is called."""
    found = find_method(owner.cls, attr)
    if found is None or frame.cls is None or not owner.attr:
        raise Untranslatable(f"{owner.cls.__name__}.{attr}")
    node = deepcopy(found[1])
    static = "staticmethod" in {ast.unparse(item) for item in node.decorator_list}
    if not static:
        node.args.args[0].arg, own = "self", node.args.args[0].arg
        node.body = [
            _OfModule(owner, own).visit(item) for item in node.body if not makes_base(item)
        ]
    source = module_source(found[0].__module__)
    return run_inside(node, source, args, frame, {"self": Self()}, method=not static)


def makes_base(statement: ast.stmt) -> bool:
    """Whether a statement is `super().__init__()`, of a class without a base."""
    match statement:
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__"),
                args=[],
                keywords=[],
            )
        ):
            return True
    return False


class _OfModule(ast.NodeTransformer):
    """Writes a method's `self` as the module's attribute, and what that keeps as the module's own."""

    def __init__(self, owner: PlainObject, own: str) -> None:
        self.owner, self.own = owner, own

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Rename what the object keeps."""
        if not (isinstance(node.value, ast.Name) and node.value.id == self.own):
            self.generic_visit(node)
            return node
        known: Any = getattr(self.owner.cls, node.attr, None)
        if isinstance(known, bool | int | float | str) and isinstance(node.ctx, ast.Load):
            return ast.copy_location(ast.Constant(known), node)
        if find_method(self.owner.cls, node.attr) is not None:
            path = attribute(name("self"), self.owner.attr, node.attr)
            return ast.copy_location(path, node)
        flat = ast.Attribute(name("self"), f"{self.owner.attr}_{node.attr}", node.ctx)
        return ast.copy_location(flat, node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Rename the object itself."""
        if node.id != self.own:
            return node
        return ast.copy_location(attribute(name("self"), self.owner.attr), node)
