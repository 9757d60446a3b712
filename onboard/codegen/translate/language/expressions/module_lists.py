"""Lists of modules."""

from __future__ import annotations

import ast

from onboard.codegen.translate.language.expressions.items import slice_code
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.object_values import ModuleList
from onboard.codegen.translate.language.trees.syntax import call, name
from onboard.codegen.translate.language.values import Value


def slice_modules(owner: ModuleList, part: ast.Slice, frame: Frame) -> Value:
    """`layers[: config.num_hidden_layers]` is `layers` where the list has exactly that many."""
    if part.lower is None and part.step is None and part.upper is not None:
        upper = ast.unparse(part.upper)
        if upper.endswith("config.num_hidden_layers") or _is_length(owner, upper, frame):
            return owner
    return ModuleList(owner.made, ast.Subscript(owner.expr, slice_code(part, frame), ast.Load()))


def _is_length(owner: ModuleList, field: str, frame: Frame) -> bool:
    """Whether a list of `self` is made with one module for each number in `range(field)`."""
    init = frame.cls.init.body if frame.cls is not None and frame.cls.init is not None else []
    for statement in init:
        match statement:
            case ast.Assign(
                targets=[target], value=ast.Call(args=[ast.ListComp(generators=[loop])])
            ):
                made = call(name("range"), ast.parse(field.removeprefix("self."), mode="eval").body)
                if ast.unparse(target) == ast.unparse(owner.expr) and ast.unparse(
                    loop.iter
                ) == ast.unparse(made):
                    return not loop.ifs
    return False
