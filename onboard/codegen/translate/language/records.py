"""Settings that a constructor puts into an object of its own, a dataclass say: generated code hands
the config itself on, and reads its fields.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from copy import deepcopy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from onboard.analysis.source import find_method
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.object_values import Config
from onboard.codegen.translate.language.program.argument_facts import (
    bind,
    default_fact,
    default_nodes,
)
from onboard.codegen.translate.language.program.fields_after import WithValues, fields_after
from onboard.codegen.translate.language.trees.syntax import (
    Untranslatable,
    attribute,
    name,
    same_code,
)
from onboard.codegen.translate.language.values import Code, Known, Value

RECORDED = "_config"
"""Stands for the config in the fields of a record."""
_FUNCTIONS = {"int", "float", "max", "min", "round", "abs", "len", "math", "bool"}


@dataclass(frozen=True, eq=False)
class Record(Value):
    """An object all of whose fields are constants or computed of the config, which `expr` is."""

    entries: dict[str, Value]
    """Its fields."""
    expr: ast.expr

    def code(self) -> ast.expr:
        """Return the config's path."""
        return self.expr

    def same_as(self, other: Record) -> bool:
        """Whether both have the same fields."""
        return self.entries.keys() == other.entries.keys() and all(
            same_code(value.code(), other.entries[key].code())
            for key, value in self.entries.items()
        )

    @property
    def is_static(self) -> bool:
        """It is."""
        return True

    def fact(self) -> Value:
        """Return itself."""
        return self

    def as_parameter(self, parameter: str) -> Value:
        """Return it with the config under the parameter's name."""
        return replace(self, expr=name(parameter))

    def entry(self, key: str) -> Value:
        """Return a field."""
        if (value := self.entries.get(key)) is None:
            raise Untranslatable(f"{key} of a record, which is none of its fields")
        if isinstance(value, Known):
            return value
        return Code(_Replaced(RECORDED, self.expr).visit(deepcopy(value.code())), static=True)


def record(cls: Any, args: Args, frame: Frame) -> Record | None:
    """Return what `cls(...)` makes in a constructor, where it is such a record; None for others."""
    if frame.kind != "init" or not frame.translator.specialised or args.stars:
        return None
    configs = [value for value in frame.env.values.values() if isinstance(value, Config)]
    given = _given(cls, args)
    if given is None or not configs:
        return None
    fields = {key: _of_config(value, configs[0]) for key, value in given.items()}
    known = {key: value for key, value in fields.items() if value is not None}
    return Record(known, configs[0].expr) if known.keys() == fields.keys() else None


def _given(cls: Any, args: Args) -> dict[str, Value] | None:
    """Return the fields of what is made; None where the class is none that only keeps them."""
    if cls is SimpleNamespace and not args.positional:
        return dict(args.keywords)
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        return _kept(cls, args) if inspect.isclass(cls) else None
    fields = dataclasses.fields(cls)
    defaults = {
        item.name: Known(item.default) for item in fields if item.default is not dataclasses.MISSING
    }
    given = dict(zip([item.name for item in fields], args.positional, strict=False))
    made: dict[str, Value] = {**defaults, **given, **args.keywords}
    if made.keys() != {item.name for item in fields}:
        return None
    if not hasattr(cls, "__post_init__"):
        return made
    after = fields_after(cls, {key: value.code() for key, value in made.items()})
    if after is None:
        return None
    return {key: as_known(Code(value, static=True)) for key, value in after.items()}


def _kept(cls: type, args: Args) -> dict[str, Value] | None:
    """Return what an object keeps whose class has nothing but a constructor that works it out of its
    arguments, `self.size = size // 2`.
    """
    own = {key for key, value in vars(cls).items() if not key.startswith("__")}
    found = find_method(cls, "__init__")
    if own or cls.__bases__ != (object,) or found is None or found[1].args.kwarg is not None:
        return None
    try:
        bound, rest = bind(found[1], args, method=True)
        given = {key: default_fact(node) for key, node in default_nodes(found[1]).items()} | bound
        kept = {name: value.code() for name, value in given.items()}
    except Untranslatable:
        return None
    fields: dict[str, Value] = {}
    for statement in found[1].body:
        match statement:
            case ast.Assign(
                targets=[ast.Attribute(value=ast.Name(id="self"), attr=attr)], value=made
            ):
                fields[attr] = Code(WithValues(kept).visit(deepcopy(made)), static=True)
                kept[f"self.{attr}"] = fields[attr].code()
            case ast.Expr(value=ast.Constant()):
                pass
            case _:
                return None
    return {key: as_known(value) for key, value in fields.items()} if not rest else None


def as_known(value: Value) -> Value:
    """Return a constant as one."""
    match value.code():
        case ast.Constant(value=known):
            return Known(known)
    return value


def _of_config(value: Value, config: Config) -> Value | None:
    """Return a field in terms of the config; None where it reads anything else."""
    if isinstance(value, Known):
        return value
    if not (isinstance(value, Code) and value.static):
        return None
    expr = _Replaced(ast.unparse(config.expr), name(RECORDED)).visit(deepcopy(value.code()))
    read = {node.id for node in ast.walk(expr) if isinstance(node, ast.Name)}
    return Code(expr, static=True) if read <= {RECORDED, *_FUNCTIONS} else None


def in_record(field: str) -> Code:
    """Return a field of the config as one of a record."""
    return Code(attribute(name(RECORDED), field), static=True)


class _Replaced(ast.NodeTransformer):
    """Writes an expression in the place of each that reads so."""

    def __init__(self, text: str, new: ast.expr) -> None:
        self.text, self.new = text, new

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace a name."""
        return self.new if node.id == self.text else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Replace an attribute, or what it is of."""
        if ast.unparse(node) == self.text:
            return self.new
        self.generic_visit(node)
        return node
