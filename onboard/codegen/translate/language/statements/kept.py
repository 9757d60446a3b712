"""What repositories' modules keep in attributes besides modules and buffers."""

from __future__ import annotations

import ast

import torch

from onboard.analysis.behaviour.kept_tables import keeps_table
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.trees.casts import without_casts
from onboard.codegen.translate.language.values import Value


def is_table(attr: str, value: Value, frame: Frame) -> bool:
    """Whether a constructor of repositories' code keeps a tensor as a plain attribute, which would
    stay where it was made.
    """
    if not frame.translator.specialised or frame.cls is None or value.is_static:
        return False
    kept = [vars(module).get(attr) for module in frame.translator.modules_of(frame.cls.cls)]
    return bool(kept) and all(isinstance(item, torch.Tensor) for item in kept)


def is_cast(expr: ast.expr, attr: str) -> bool:
    """Whether an attribute of `self` is cast, and nothing else."""
    inner = without_casts(expr)
    return inner is not expr and ast.unparse(inner) == f"self.{attr}"


def is_made_again(attr: str, frame: Frame) -> bool:
    """Whether a forward of repositories' code makes the table anew that the constructor left."""
    program = frame.translator
    if not program.specialised or frame.cls is None or frame.kind != "forward":
        return False
    return keeps_table(program.model, frame.cls.cls, attr)
