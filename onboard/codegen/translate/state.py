"""Classes under translation and their translated functions."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from onboard.analysis.source import ModuleSource
from onboard.codegen.translate import narrow, objects, rescaled
from onboard.codegen.translate.forms import TRIANGLE
from onboard.codegen.translate.holes import Hole
from onboard.codegen.translate.object_values import Config, Global, Instance, Method, ModuleList, Self
from onboard.codegen.translate.syntax import attribute
from onboard.codegen.translate.values import NONE, Code, Known, Mask, Value

if TYPE_CHECKING:
    from onboard.codegen.translate.classes import Translator
    from onboard.codegen.translate.frame import Frame


def _is_triangular(buffer: torch.Tensor) -> bool:
    rows, columns = buffer.shape[-2:] if buffer.dim() > 1 else (0, 1)
    return rows == columns and bool((buffer == torch.ones_like(buffer).tril()).all())


@dataclass
class Routine:
    """A translated function: its lean parameters, its body, and what a caller gets."""

    node: ast.FunctionDef
    source: ModuleSource
    parameters: list[str] = field(default_factory=list)
    body: list[ast.stmt] = field(default_factory=list)
    shape: Value = NONE
    holes: int = 0
    static: bool = False
    """It returns one value that depends on config and constants only."""
    facts: dict[str, Value] = field(default_factory=dict)
    """What the translation takes for granted of its parameters."""
    given: Value | None = None
    """What a caller gets, in terms of the parameters, where that is nothing but some of these."""
    optional: set[str] = field(default_factory=set)
    """Parameters that may be None."""

    def take(self, keys: set[str], facts: dict[str, Value]) -> None:
        """Take other parameters, too, in the order of the signature; note which may be None."""
        order = [item.arg for item in (*self.node.args.args, *self.node.args.kwonlyargs)]
        if keys:
            wanted = {*self.parameters, *keys}
            known = dict.fromkeys((*order, *self.parameters, *sorted(keys)))
            self.parameters = [key for key in known if key in wanted]
        counted = {"position_ids"}  # a call that has none passes those of the caller
        self.optional = {key for key in self.parameters if key in facts and facts[key].may_be_none} - counted
        if keys:  # those that other classes' calls have come first
            self.parameters.sort(key=lambda key: key in self.optional - keys)

    def omitting(self, given: Container[str]) -> list[str]:
        """Return the parameters that a call passes: not the last ones that it has nothing for and that may be None."""
        passed = list(self.parameters)
        while passed and passed[-1] in self.optional and passed[-1] not in given:
            passed.pop()
        return passed

    @property
    def keeps_one(self) -> bool:
        """Whether it makes one tensor of one, as nn.Identity does, so that either may be called."""
        first = self.node.args.args[1].arg if len(self.node.args.args) > 1 else None
        return self.parameters == [first] and isinstance(self.shape, Hole)


@dataclass(eq=False)
class ClassState:
    """A class under translation."""

    cls: type
    translator: Translator
    attributes: dict[str, Value] = field(default_factory=dict)
    init: Routine | None = None
    methods: dict[str, Routine] = field(default_factory=dict)
    guards: list[ast.expr] = field(default_factory=list)
    weights_only: list[str] = field(default_factory=list)
    """Modules and parameters that nothing reads: they hold weights that checkpoints have."""
    sometimes: set[str] = field(default_factory=set)
    """Attributes that `__init__` sets under a condition only."""
    inherits_init: bool = False
    """Its `__init__` is PyTorch's."""
    fills_window: bool = False
    """Its code puts the window of attention's mask into a mask of its own."""
    read_outside: set[str] = field(default_factory=set)
    """Attributes that other classes read."""

    def has(self, attr: str) -> bool:
        """Whether `self.attr` exists."""
        return attr in self.attributes or hasattr(self.cls, attr)

    def attribute(self, attr: str, owner: ast.expr, frame: Frame) -> Value:
        """Return `owner.attr` for an instance `owner` of this class."""
        path = attribute(owner, attr)
        if not (isinstance(owner, ast.Name) and owner.id == "self"):
            self.read_outside.add(attr)
        elif f"self.{attr}" in frame.env.values:
            return frame.env.values[f"self.{attr}"]
        match value := self.attributes.get(attr):
            case Known() if frame.kind != "init" and (turned := rescaled.switched(self, attr)) is not None:
                return turned
            case Known() | Mask():
                return value
            case Instance():
                own = isinstance(owner, ast.Name) and owner.id == "self"
                return narrow.possible(replace(value, expr=path), attr, frame) if own else replace(value, expr=path)
            case ModuleList(made=made):
                return ModuleList(made, path)
            case Config(obj=obj):
                return Config(path, obj)
            case Code(static=static, optional=optional):
                form = TRIANGLE if frame.kind == "forward" and self._is_triangle(attr) else None
                return Code(path, static, optional=optional, form=form)
            case Global():
                return value
        return objects.module_fact(attr) or self._class_attribute(attr, path)

    def _is_triangle(self, attr: str) -> bool:
        """Whether a buffer is a causal mask of zeros and ones in all modules of this class."""
        modules = [module for module in self.translator.model.modules() if type(module) is self.cls]
        buffers = [module._buffers.get(attr) for module in modules]
        return bool(buffers) and all(buffer is not None and _is_triangular(buffer) for buffer in buffers)

    def _class_attribute(self, attr: str, path: ast.expr) -> Value:
        value = inspect.getattr_static(self.cls, attr, None)
        if isinstance(value, bool | int | float | str):
            return Known(value)
        if inspect.isroutine(value) or isinstance(value, staticmethod | classmethod):
            return Method(Self(), attr)
        return Code(path, optional=self.inherits_init)  # a bias may be None


class Restart(Exception):
    """Facts grew: what was translated with the old ones is void."""
