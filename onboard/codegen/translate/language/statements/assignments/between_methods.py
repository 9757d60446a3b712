"""What a method of a module leaves there for another method of it, both of which one forward calls
(`q = self.experts.map(x)`, then `self.experts.reduce(y)`): in generated code it is in a dict that this
forward makes and hands to both.
"""

from __future__ import annotations

import ast
from collections.abc import Collection

from torch import nn

from onboard.analysis.source import module_source
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.trees.syntax import Untranslatable, name
from onboard.codegen.translate.language.values import Code, Value

BETWEEN_METHODS = "between_methods"
"""The variable that has it in methods of the module itself; whose parts have theirs behind it."""


def leave(attr: str, value: Value, frame: Frame) -> None:
    """Write what a forward leaves at `self` where other methods read it."""
    if frame.cls is not None and isinstance(value, Code) and _is_left(frame.cls.cls, attr):
        frame.emit(ast.Assign([_place(attr, ast.Store())], value.code()))


def left_before(attr: str, frame: Frame) -> Code | None:
    """Return what another method has left at `self`; None for what none leaves."""
    if frame.kind != "forward" or not frame.translator.specialised or frame.cls is None:
        return None
    left = _is_left(frame.cls.cls, attr) and not hasattr(frame.cls.cls, attr)
    return Code(_place(attr, ast.Load())) if left else None


def handed_to(function: ast.expr) -> ast.expr:
    """Return the dict that a call of a module's method is handed.

    Raises:
        Untranslatable: the module is none that the caller has by a name of its own.
    """
    match function:
        case ast.Attribute(value=ast.Name(id="self")):
            return name(BETWEEN_METHODS)
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr=part)):
            return name(f"{BETWEEN_METHODS}_of_{part}")
    raise Untranslatable(f"{ast.unparse(function)}, which reads what another method has left")


def made_first(used: Collection[str], whole: bool) -> list[ast.stmt]:
    """Return the statements that make the dicts that a routine uses: those of its parts, and its own
    where it is the `whole` forward.
    """
    own = {BETWEEN_METHODS} if whole else set()
    needed = sorted(key for key in used if key in own or key.startswith(f"{BETWEEN_METHODS}_of_"))
    return [ast.Assign([name(key, store=True)], ast.Dict([], [])) for key in needed]


def _place(attr: str, context: ast.expr_context) -> ast.Subscript:
    return ast.Subscript(name(BETWEEN_METHODS), ast.Constant(attr), context)


def _is_left(cls: type, attr: str) -> bool:
    """Whether one method of a class assigns an attribute, and another one reads it without."""
    stores, reads = (_methods_with(cls, attr, kind) for kind in (ast.Store, ast.Load))
    return bool(stores) and "__init__" not in stores and bool(reads - stores)


def _methods_with(cls: type, attr: str, kind: type[ast.expr_context]) -> set[str]:
    """Return the methods that assign `self.attr`, or read it."""
    return {
        method.name
        for owner in cls.__mro__[: cls.__mro__.index(nn.Module)]
        if (made := module_source(owner.__module__).classes.get(owner.__qualname__))
        for method in made.body
        if isinstance(method, ast.FunctionDef)
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, kind)
        and ast.unparse(node) == f"self.{attr}"
    }
