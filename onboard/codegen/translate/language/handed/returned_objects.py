"""What a forward returns by names: outputs of transformers, and objects of repositories' classes that
do nothing but keep what they are given.
"""

from __future__ import annotations

import ast
import dataclasses
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

from torch import nn
from transformers.utils import ModelOutput

from onboard.analysis.source import find_method
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.expressions.objects import is_own
from onboard.codegen.translate.language.forms import LIST
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.handed.by_name import Output
from onboard.codegen.translate.language.program.argument_facts import (
    bind,
    default_fact,
    default_nodes,
)
from onboard.codegen.translate.language.records import Record
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.language.values import Items, Known, Mapping, Value

_NAMESPACES = (Namespace, SimpleNamespace)
_OF_EVERY_CLASS = {*vars(type("_", (), {})), "__init__", "__annotations__", "__repr__"}


def output(cls: object, args: Args, frame: Frame) -> Output | None:
    """Return the value of `cls(...)` for such a class; None for any other."""
    if not isinstance(cls, type):
        return None
    if issubclass(cls, ModelOutput):
        return _of_fields(cls, args, frame)
    if frame.kind == "init":
        return None
    return kept_by(cls, args, frame)


def kept_by(cls: object, args: Args, frame: Frame) -> Output | None:
    """Return the value of `cls(...)` for a class that only keeps what it is given, or what
    `dataclasses.replace` makes of such an object; None for others.
    """
    if cls is dataclasses.replace and len(args.positional) == 1 and not args.stars:
        return _replaced(args.positional[0], args)
    if not isinstance(cls, type) or not frame.translator.specialised or args.stars:
        return None
    if cls in _NAMESPACES:
        return None if args.positional else Output(dict(args.keywords), cls)
    if not is_own(cls, frame):
        return None
    if dataclasses.is_dataclass(cls):
        kept = _of_fields(cls, args, frame)
        return _made(kept, "__post_init__", Args([], {}, []), frame)
    plain = find_method(cls, "__init__") is not None and not issubclass(cls, nn.Module)
    made = _of_constructor(cls, args)
    return made or (_made(Output({}, cls), "__init__", args, frame) if plain else None)


def _made(kept: Output, method: str, args: Args, frame: Frame) -> Output | None:
    """Return what an object keeps once a method has run that makes it; None where a constructor would
    have to, whose objects are its module's.
    """
    if not hasattr(kept.cls, method):
        return kept
    if frame.kind == "init":
        return None
    made = frame.translator.call_object(kept, method, args, frame)
    return made if isinstance(made, Output) else None


def _replaced(whole: Value, args: Args) -> Output | None:
    match whole:
        case Record(entries=entries):
            kept: dict[str, Value] = {key: whole.entry(key) for key in entries}
            return Output({**kept, **args.keywords})
        case Output(fields=fields):
            return Output({**fields, **args.keywords}, whole.cls)
    return None


def _of_fields(cls: type, args: Args, frame: Frame) -> Output:
    """Return what a dataclass keeps."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    names = [field.name for field in fields if field.init]
    defaults = {field.name: _default(field, cls, frame) for field in fields}
    given = dict(zip(names, args.positional, strict=False))
    kept = {**defaults, **given, **args.keywords}
    return Output({key: value for key, value in kept.items() if value is not None}, cls)


def _default(field: dataclasses.Field[Any], cls: type, frame: Frame) -> Value | None:
    """Return what a dataclass keeps that is not given; None: what nothing may read, or is None in an
    output of transformers.
    """
    if field.default_factory is list:
        return Items((), kind=LIST)
    if field.default_factory is dict:
        return Mapping({})
    if field.default == () or field.default_factory is tuple:
        return Items(())
    if isinstance(field.default_factory, type):
        return kept_by(field.default_factory, Args([], {}, []), frame)
    known = isinstance(field.default, bool | int | float | str)
    nothing = field.default is None and not issubclass(cls, ModelOutput)
    return Known(field.default) if known or nothing else None


def _of_constructor(cls: type, args: Args) -> Output | None:
    """Return what a class keeps that has nothing but a constructor, `self.logits = logits`."""
    found = find_method(cls, "__init__")
    if cls.__bases__ != (object,) or found is None or not vars(cls).keys() <= _OF_EVERY_CLASS:
        return None
    try:
        bound, rest = bind(found[1], args, method=True)
        defaults = {key: default_fact(node) for key, node in default_nodes(found[1]).items()}
    except Untranslatable:
        return None
    kept = [_kept(statement, defaults | bound) for statement in found[1].body]
    if rest or None in kept:
        return None
    return Output({key: value for each in kept if each for key, value in each.items()}, cls)


def _kept(statement: ast.stmt, given: dict[str, Any]) -> dict[str, Value] | None:
    """Return what a statement of a constructor keeps; None where it does anything else."""
    match statement:
        case ast.Expr(value=ast.Constant()) | ast.Pass():
            return {}
        case (
            ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=attr)], value=value)
            | ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=attr), value=value)
        ):
            known = given.get(value.id) if isinstance(value, ast.Name) else None
            return None if known is None else {attr: known}
    return None
