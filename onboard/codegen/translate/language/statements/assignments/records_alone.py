"""Attributes in which a forward records what no code reads: routers' logits of all layers, say."""

from __future__ import annotations

import ast

from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.trees import syntax
from onboard.codegen.translate.language.values import Unread


def only_records(node: ast.stmt, error: Exception, frame: Frame) -> bool:
    """Whether a statement of a repository's forward whose value has no translation puts it into an
    attribute of `self` that nothing in the file reads. Whoever else reads it is told of the error.
    """
    attr, program = _stored(node), frame.translator
    if attr is None or not isinstance(error, syntax.Untranslatable) or not program.specialised:
        return False
    if frame.kind != "forward" or frame.cls is None or _is_read(attr, frame.source.tree):
        return False
    reason = syntax.with_place(error, str(error))
    frame.env.values[f"self.{attr}"] = Unread(reason, syntax.led_by(error, frame))
    return True


def _stored(node: ast.AST) -> str | None:
    """Return the attribute of `self` that a statement assigns, and no other; None for others."""
    match node:
        case ast.Assign(targets=[target]) | ast.AugAssign(target=target):
            match target:
                case ast.Attribute(value=ast.Name(id="self"), attr=attr):
                    return attr
    return None


def _is_read(attr: str, tree: ast.Module) -> bool:
    """Whether code reads an attribute of this name, of any object, or one whose name is made; not to
    make what it puts there.
    """
    records = [node for node in ast.walk(tree) if _stored(node) == attr]
    inside = {id(item) for node in records for item in ast.walk(node)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=found, ctx=ast.Load()) if found == attr:
                if id(node) not in inside:
                    return True
            case ast.Constant(value=str() as text) if text == attr:
                return True
    return False
