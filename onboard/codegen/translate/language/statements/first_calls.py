"""What the first call of a forward leaves for later ones: each call of generated code makes it."""

from __future__ import annotations

import ast

from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.values import NONE


def is_made_first(node: ast.If, frame: Frame) -> bool:
    """Whether the side of a forward's branch is the one that a new model takes: it makes an
    attribute that is None before, as whose item the other side would fail.
    """
    if frame.kind != "forward" or frame.cls is None or node.orelse:
        return False
    if not frame.translator.specialised:
        return False
    stored = {
        item.attr
        for statement in node.body
        for item in ast.walk(statement)
        if isinstance(item, ast.Attribute)
        and isinstance(item.ctx, ast.Store)
        and ast.unparse(item.value) == "self"
    }
    made = frame.cls.attributes
    now = [frame.env.values.get(f"self.{key}", made.get(key)) for key in stored]
    return any(value is not None and value.equals(NONE) for value in now)
