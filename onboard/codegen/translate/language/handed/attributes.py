"""What is read of an object, or put into it: its fields, and what its class says of all of its kind."""

from __future__ import annotations

import dataclasses
import inspect
from enum import Enum
from functools import cached_property

import torch
from torch import nn
from transformers.utils import ModelOutput

from onboard.analysis.source import find_method
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.handed.by_name import ByName, Named, Output
from onboard.codegen.translate.language.handed.left_in_arguments import Left
from onboard.codegen.translate.language.object_values import Global, Method
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.language.values import NONE, Items, Known, Mapping, Value


def called(owner: ByName | Global, attr: str, args: Args, frame: Frame) -> Value | None:
    """Return what a method gives of an object, or of a class of repositories' code that makes some;
    None for others.
    """
    if isinstance(owner, Global):
        known = frame.translator.specialised and _makes_objects(owner.obj, attr)
        return frame.translator.call_object(owner, attr, args, frame) if known else None
    if attr in owner.entries or owner.cls is None:
        return None
    if isinstance(owner, Named) and attr == "_replace":
        return owner.having(owner.entries | args.keywords)
    if isinstance(owner, Named) and attr == "_asdict":
        return Mapping(owner.entries)
    if issubclass(owner.cls, ModelOutput) and attr == "to_tuple":
        return Items(tuple(item for item in owner.entries.values() if not item.equals(NONE)))
    found = find_method(owner.cls, attr)
    if found is None or found[0].__module__.startswith("transformers."):
        return None
    return frame.translator.call_object(owner, attr, args, frame)


def _makes_objects(cls: object, attr: str) -> bool:
    """Whether an attribute is a class method of a class whose objects keep values."""
    if not isinstance(cls, type) or issubclass(cls, nn.Module | torch.autograd.Function):
        return False
    plain = not hasattr(torch, cls.__name__) and find_method(cls, attr) is not None
    return plain and isinstance(inspect.getattr_static(cls, attr), classmethod)


def has(owner: ByName, attr: str) -> bool:
    """Whether an object has an attribute."""
    return attr in owner.entries or (owner.cls is not None and hasattr(owner.cls, attr))


def has_own(owner: Output, attr: str) -> bool:
    """Whether an object has an attribute that is not the one of all dicts."""
    inherited = owner.cls is None or issubclass(owner.cls, ModelOutput)
    return attr in owner.fields or not inherited and hasattr(owner.cls, attr)


def attribute_of(owner: ByName, attr: str, frame: Frame) -> Value:
    """Return `owner.attr`; fields of outputs that nothing has put there are None."""
    if attr in owner.entries:
        if isinstance(part := owner.entries[attr], Left):
            part.read()
        return part
    found = inspect.getattr_static(owner.cls, attr, None)
    if isinstance(found, property | cached_property):
        return frame.translator.call_object(owner, attr, Args([], {}, []), frame)
    if isinstance(found, bool | int | float | str):
        return Known(found)
    if inspect.isroutine(found) or isinstance(found, staticmethod | classmethod):
        return Method(owner, attr)
    if owner.cls is None or issubclass(owner.cls, ModelOutput):
        return NONE
    raise Untranslatable(f"{attr} of {owner.cls.__name__}(...), which does not have it")


def constant(cls: type, attr: str) -> Known | None:
    """Return a number or a text that a class of settings has; None for anything else."""
    found = inspect.getattr_static(cls, attr, None)
    plain = isinstance(found, bool | int | float | str) and not issubclass(cls, Enum)
    return Known(found) if plain else None


def asked(value: Value, frame: Frame) -> Value:
    """Return what tells whether a value counts as true: of an object what its class computes for that."""
    for method in ("__bool__", "__len__"):
        if isinstance(value, Output) and hasattr(value.cls, method):
            return called(value, method, Args([], {}, []), frame) or value
    return value


def are_equal(one: Value, other: Value, frame: Frame) -> Value | None:
    """Return what the class of an object says of `one == other`; None where it says nothing."""
    if not isinstance(one, Output) or one.cls is None or "__eq__" not in vars(one.cls):
        return None
    if not dataclasses.is_dataclass(one.cls):
        return called(one, "__eq__", Args([other], {}, []), frame)
    same = one.is_like(other) and one.is_static and other.is_static
    return Known(one.equals(other)) if same and _are_known(one) and _are_known(other) else None


def _are_known(value: Value) -> bool:
    parts = value.parts()
    return all(map(_are_known, parts)) if parts else isinstance(value, Known)
