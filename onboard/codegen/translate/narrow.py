"""What a branch says of its layer's modules: layers of other kinds do not get there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from onboard.codegen.translate.frame import Frame
from onboard.codegen.translate.values import Instance, Value, is_static, residual


@contextmanager
def narrowed(test: Value, outcome: bool, frame: Frame) -> Iterator[None]:
    """Evaluate a branch that is taken where `test` is `outcome`, knowing which layers of the model take it."""
    before = frame.layers
    if frame.kind == "forward" and frame.cls is not None and is_static(test):
        layers = frame.translator.modules_of(frame.cls.cls) if before is None else before
        frame.layers = [layer for layer in layers if _holds(test, layer, frame) in (outcome, None)]
    try:
        yield
    finally:
        frame.layers = before


def _holds(test: Value, layer: nn.Module, frame: Frame) -> bool | None:
    """Return the value of a static condition in one layer; None where it cannot be known before the model runs."""
    names = {**frame.source.namespace, "config": frame.translator.config, "self": layer}
    try:
        return bool(eval(ast.unparse(residual(test)), names))
    except (AttributeError, NameError, TypeError, KeyError, IndexError):  # it reads arguments, or what others have
        return None


def possible(module: Instance, attr: str, frame: Frame) -> Instance:
    """Return `self.attr` without the classes that it has only in layers that do not get here."""
    if not frame.layers or frame.cls is None:  # no layer of this config does: all may be
        return module
    here = {type(getattr(layer, attr, None)) for layer in frame.layers}
    everywhere = {type(getattr(layer, attr, None)) for layer in frame.translator.modules_of(frame.cls.cls)}
    return replace(module, made=tuple(way for way in module.made if way.cls not in everywhere - here))
