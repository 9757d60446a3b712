"""What the forward of a layer leaves at a class, for the layers behind it: in generated code it is in
a dict that the whole model makes for each text and hands to all. What a constructor leaves there for
other modules of its class each of these makes itself.
"""

from __future__ import annotations

import ast
from typing import Any

from torch import nn

from onboard.analysis.behaviour.left_at_classes import BETWEEN_LAYERS, made_once, place_of
from onboard.analysis.source import class_node
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.object_values import Global
from onboard.codegen.translate.language.trees.syntax import name
from onboard.codegen.translate.language.values import NONE, Code, Value


def left_behind(obj: Any, attr: str, frame: Frame) -> Value | None:
    """Return an attribute of a class as the text's earlier layers left it, or in a constructor as that
    of the first module found and left it; None for any other.
    """
    if frame.kind == "init":
        own = frame.translator.specialised and frame.cls is not None and obj is frame.cls.cls
        made = own and attr in made_once(obj)
        return frame.env.values.get(f"self.{attr}", NONE) if made else None
    if not (frame.translator.specialised and _leaves(obj, attr)):
        return None
    return Code(_place(obj, attr, ast.Load()))


def is_left_behind(
    owner: ast.expr, attr: str, value: Value, frame: Frame, origin: ast.AST | None
) -> bool:
    """Whether a forward assigns an attribute of a class, which is left in the dict, or a constructor."""
    if frame.kind not in ("forward", "init") or not isinstance(owner, ast.Name):
        return False
    match frame.evaluate(owner):
        case Global(obj=obj) if frame.kind == "init":
            if left_behind(obj, attr, frame) is None:
                return False
            frame.bind(variable := frame.fresh(attr.strip("_")), value, origin)
            frame.env.values[f"self.{attr}"] = frame.env.values[variable]
            return True
        case Global(obj=obj) if left_behind(obj, attr, frame) is not None:
            frame.emit(ast.Assign([_place(obj, attr, ast.Store())], value.code()), origin)
            return True
    return False


def made_for_each_text(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the whole model's forward with the dict made first."""
    made = ast.Assign([name(BETWEEN_LAYERS, store=True)], ast.Dict([], []))
    return [ast.copy_location(made, body[0]), *body]


def _place(cls: type, attr: str, context: ast.expr_context) -> ast.Subscript:
    return ast.Subscript(name(BETWEEN_LAYERS), ast.Constant(place_of(cls, attr)), context)


def _leaves(obj: Any, attr: str) -> bool:
    """Whether a method of a class of modules assigns an attribute of the class by its name."""
    own = isinstance(obj, type) and issubclass(obj, nn.Module) and attr in vars(obj)
    return own and any(
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node) == f"{obj.__name__}.{attr}"
        for node in ast.walk(class_node(obj))
    )
