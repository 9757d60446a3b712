"""Attributes that have no translation: in which a forward records what no code reads, routers'
logits of all layers, say, or a constructor keeps what is neither module nor weight.
"""

from __future__ import annotations

import ast

import torch
from torch import nn

from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.trees import syntax
from onboard.codegen.translate.language.values import Unread


def only_records(node: ast.stmt, error: Exception, frame: Frame) -> bool:
    """Whether a statement of a repository's forward whose value has no translation puts it into an
    attribute of `self` that nothing in the file reads, or one of a constructor that into an attribute
    without weights. Whoever reads it is told of the error.
    """
    attr, program = _stored(node), frame.translator
    if attr is None or not isinstance(error, syntax.Untranslatable) or not program.specialised:
        return False
    if frame.kind == "function" or frame.cls is None:
        return False
    if frame.kind == "init" and not _has_no_weights(attr, frame):
        return False
    if frame.kind == "forward" and _is_read(attr, frame.source.tree):
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


def _has_no_weights(attr: str, frame: Frame) -> bool:
    """Whether an attribute of the small model's modules is there, and no module, parameter or buffer."""
    assert frame.cls is not None
    kept = [getattr(each, attr, None) for each in frame.translator.modules_of(frame.cls.cls)]
    tensors = any(isinstance(each, nn.Module | torch.Tensor) for each in kept)
    return bool(kept) and not tensors and None not in kept


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
