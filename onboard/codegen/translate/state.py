"""Classes under translation and their translated functions."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import nn

from onboard.analysis.source import ModuleSource
from onboard.codegen.translate import narrow, objects
from onboard.codegen.translate.values import (
    NONE,
    Code,
    Config,
    Global,
    Hole,
    Instance,
    Known,
    Mask,
    Method,
    ModuleList,
    Self,
    Value,
    attribute,
)

if TYPE_CHECKING:
    from onboard.codegen.translate.classes import Translator
    from onboard.codegen.translate.frame import Frame


@dataclass
class Routine:
    """A translated function: its lean parameters, its body, and what a caller gets."""

    node: ast.FunctionDef
    source: ModuleSource
    parameters: list[str] = field(default_factory=list)
    body: list[ast.stmt] = field(default_factory=list)
    shape: Value = NONE
    holes: int = 0

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
    read_outside: set[str] = field(default_factory=set)
    """Attributes that other classes read."""

    def instances(self) -> list[nn.Module]:
        """Return the tiny model's modules of this class."""
        return [module for module in self.translator.model.modules() if type(module) is self.cls]

    def has(self, attr: str) -> bool:
        """Whether `self.attr` exists."""
        return attr in self.attributes or hasattr(self.cls, attr)

    def attribute(self, attr: str, owner: ast.expr, frame: Frame) -> Value:
        """Return `owner.attr` for an instance `owner` of this class."""
        path = attribute(owner, attr)
        if not (isinstance(owner, ast.Name) and owner.id == "self"):
            self.read_outside.add(attr)
        elif frame.kind == "init" and f"self.{attr}" in frame.env.values:
            return frame.env.values[f"self.{attr}"]
        match value := self.attributes.get(attr):
            case Known() | Mask():
                return value
            case Instance():
                own = isinstance(owner, ast.Name) and owner.id == "self"
                return narrow.possible(replace(value, expr=path), attr, frame) if own else replace(value, expr=path)
            case ModuleList(made=made):
                return ModuleList(made, path)
            case Config(obj=obj):
                return Config(path, obj)
            case Code(static=static):
                return Code(path, static)
            case Global():
                return value
        return objects.module_fact(attr) or self._class_attribute(attr, path)

    def _class_attribute(self, attr: str, path: ast.expr) -> Value:
        value = inspect.getattr_static(self.cls, attr, None)
        if isinstance(value, bool | int | float | str):
            return Known(value)
        if inspect.isroutine(value) or isinstance(value, staticmethod | classmethod):
            return Method(Self(), attr)
        return Code(path)
