"""Modules that a constructor puts in half precision: `nn.Linear(...).half().to(device)`."""

from __future__ import annotations

import ast

import torch

from onboard.analysis.source import class_node
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import Global, Instance
from onboard.codegen.translate.language.values import Known, Value
from onboard.hf.half_parameters import TO_HALF, takes_models_dtype


class HalvedModules(Mechanism):
    """They take the model's dtype, where their class does not mind, and are where it is."""

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """The module itself."""
        if frame.kind != "init" or frame.cls is None or not _moves(attr, args):
            return None
        made = isinstance(owner, Instance) and isinstance(owner.expr, ast.Call)
        return owner if made and takes_models_dtype(class_node(frame.cls.cls)) else None


def _moves(attr: str, args: Args) -> bool:
    """Whether a method of modules makes halves of their parameters, or puts them on a device alone."""
    match [*args.positional, *args.keywords.values()]:
        case []:
            return attr in TO_HALF
        case [Known(value=torch.device() | str()) | Global(obj=torch.device())]:
            return attr == "to"
    return False
