"""What a condition that differs between layers says of the modules inside: `self.mixer` is of one class under it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from onboard.codegen.translate.values import Instance, Value, is_static, residual

if TYPE_CHECKING:
    from onboard.codegen.translate.frame import Frame

Modules = list[nn.Module] | None
"""The small model's modules of a class that code is evaluated for; None: all of them."""


def split(test: Value, frame: Frame) -> tuple[Modules, Modules]:
    """Return the modules for which a static condition holds, and those for which it does not."""
    if frame.cls is None or not is_static(test):
        return frame.modules, frame.modules
    names = {**frame.source.namespace, "config": frame.translator.config}
    sides: tuple[list[nn.Module], list[nn.Module]] = ([], [])
    for module in _modules(frame):
        try:
            holds = bool(_evaluated(residual(test), {**names, "self": module}))
        except Exception:  # it reads a local variable, or something that only `__init__` has: nothing is learnt
            return frame.modules, frame.modules
        sides[not holds].append(module)
    return sides


@contextmanager
def assuming(modules: Modules, frame: Frame) -> Iterator[None]:
    """Evaluate code that only some of the modules reach."""
    saved, frame.modules = frame.modules, modules
    try:
        yield
    finally:
        frame.modules = saved


def narrowed(instance: Instance, frame: Frame) -> Instance:
    """Return a submodule with the classes that it has in the modules that reach this code."""
    if not frame.modules or len(instance.made) < 2:
        return instance
    try:
        seen = {type(_evaluated(instance.expr, {"self": module})) for module in frame.modules}
    except Exception:  # a local variable holds it: it may be any
        return instance
    made = tuple(item for item in instance.made if item.cls in seen)
    return replace(instance, made=made) if made else instance


def _modules(frame: Frame) -> list[nn.Module]:
    if frame.modules is not None:
        return frame.modules
    assert frame.cls is not None
    return [module for module in frame.translator.model.modules() if type(module) is frame.cls.cls]


def _evaluated(expr: ast.expr, names: dict[str, Any]) -> Any:
    return eval(ast.unparse(expr), names)
