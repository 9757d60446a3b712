"""What is known where the two sides of a condition meet again."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

from onboard.codegen.translate.language.env import Env
from onboard.codegen.translate.language.expressions.conditional import joined_masks
from onboard.codegen.translate.language.frame import Frame, Sides
from onboard.codegen.translate.language.handed.by_name import ByName, Output
from onboard.codegen.translate.language.object_values import (
    Choice,
    Global,
    Instance,
    ModuleList,
    is_class,
    joined_ways,
)
from onboard.codegen.translate.language.sequences import sequence_of_all
from onboard.codegen.translate.language.trees.syntax import (
    Untranslatable,
    attribute,
    call,
    name,
    stored_names,
)
from onboard.codegen.translate.language.values import NONE, Code, Known, Mapping, Unread, Value

Branch = tuple[list[ast.stmt], Env]


def joined_env(one_side: Branch, other_side: Branch, test: Value, frame: Frame) -> Env:
    """Return what is known after either branch; what differs becomes a run-time variable, or of
    classes of modules a choice by the test.
    """
    (first, one), (second, other) = one_side, other_side
    joined = Env()
    objects: dict[tuple[int, int], Value] = {}
    for key in {**one.values, **other.values}:
        a, b = one.values.get(key), other.values.get(key)
        if a is None or b is None:
            joined.values[key] = a if a is not None else b  # type: ignore[assignment]
        elif isinstance(a, ModuleList) and isinstance(b, ModuleList) and a.equals(b):
            joined.values[key] = replace(a, made=joined_ways(a.made, b.made))
        elif a.equals(b):
            joined.values[key] = _of_one_form(a, b, [*first, *second])
        elif test.is_static and _is_class(a) and _is_class(b):
            joined.values[key] = Choice(test.code(), a, b)
        elif isinstance(a, ByName) and (id(a), id(b)) in objects:
            joined.values[key] = objects[id(a), id(b)]  # one object under several names
        else:
            joined.values[key] = objects[id(a), id(b)] = _joined(
                key, [(a, first), (b, second)], frame
            )
    return joined


def _is_class(value: Value) -> bool:
    """Whether a value is a class of modules, or one of several."""
    match value:
        case Choice(first=first, second=second):
            return _is_class(first) and _is_class(second)
        case Global():
            return is_class(value)
    return False


def _of_one_form(a: Value, b: Value, branches: list[ast.stmt]) -> Value:
    """Return one of two values of the same code: what one branch knows of it holds behind both, but
    not of a variable to which a branch has assigned.
    """
    if not isinstance(a, Code):
        return a
    other = isinstance(b, Code) and a.form != b.form
    if other and isinstance(a.expr, ast.Name) and a.expr.id in stored_names(branches):
        return replace(a, form=None)
    return b if a.form is None else a


def side_taken(one: Env, other: Env, frame: Frame) -> int | None:
    """Return which side of a condition the small model's modules have taken, 0 or 1, where a
    constructor of repositories' code has a module of a class of theirs after one, and after the other
    an entry of a table, say, of which nothing is known; None for other conditions.
    """
    if frame.kind != "init" or not frame.translator.specialised or frame.cls is None:
        return None
    modules = frame.translator.modules_of(frame.cls.cls)
    for key in one.values.keys() & other.values.keys():
        pair = [one.values[key], other.values[key]]
        made = [index for index, value in enumerate(pair) if isinstance(value, Instance)]
        module, entry = (pair[made[0]], pair[1 - made[0]]) if len(made) == 1 else (None, None)
        if not isinstance(module, Instance) or type(entry) is not Code:
            continue
        if not any(map(frame.translator.translates, module.classes)):
            continue
        kept = {type(getattr(each, key.removeprefix("self."), None)) for each in modules}
        if len(kept) == 1:
            return made[0] if kept <= {*module.classes} else 1 - made[0]
    return None


def note_conditional(one: Env, other: Env, frame: Frame) -> None:
    """Note attributes of `self` that exist after one side of a condition only."""
    if frame.cls is not None and frame.kind == "init":
        either = one.values.keys() ^ other.values.keys()
        frame.cls.sometimes.update(
            key.removeprefix("self.") for key in either if key.startswith("self.")
        )


Sided = Sequence[tuple[ByName, list[ast.stmt]]]


def _are_like(sides: Sided) -> bool:
    """Whether all are outputs, or have parts of the same names."""
    (first, _), *others = sides
    outputs = all(type(value) is Output for value, _ in sides)
    return outputs or all(first.is_like(value) for value, _ in others)


def _joined_objects(key: str, sides: Sided, frame: Frame) -> ByName:
    """Return an object each of whose parts is what either side has put there, if only None."""
    (first, _), *_ = sides
    fields = {}
    for attr in dict.fromkeys(attr for value, _ in sides for attr in value.entries):
        values = [(value.entries.get(attr, NONE), side) for value, side in sides]
        same = all(value.equals(values[0][0]) for value, _ in values)
        fields[attr] = values[0][0] if same else _joined(f"{key}_{attr}", values, frame)
    return first.having(fields)


def _joined(key: str, sides: Sides, frame: Frame) -> Value:
    values = [value for value, _ in sides]
    if (known_as := frame.mechanisms.joined(sides)) is not None:
        return known_as
    if all(isinstance(value, Mapping) for value in values):
        first, second = (value.items for value in values if isinstance(value, Mapping))
        merged = {**second, **first}
        if all(first[item].equals(second[item]) for item in first.keys() & second.keys()):
            return Mapping(merged)
    if (mask := joined_masks(*values)) is not None:
        return mask
    objects = [(value, side) for value, side in sides if isinstance(value, ByName)]
    if len(objects) == len(sides) and "." not in key and _are_like(objects):
        return _joined_objects(key, objects, frame)
    if unread := [value for value in values if isinstance(value, Unread)]:
        return unread[0]
    modules = [value for value in values if isinstance(value, Instance)]
    if len(modules) == len(values) and not key.startswith("self."):
        for module, (_, statements) in zip(modules, sides, strict=True):
            statements.append(ast.Assign([name(key, store=True)], module.expr))
        made = tuple(way for module in modules for way in module.made)
        return Instance(made, name(key), any(module.optional for module in modules))
    if key.startswith("self.") and frame.kind != "init":
        raise Untranslatable(f"{key}, which forward changes under a condition")
    if "." in key and not key.startswith("self."):
        raise Untranslatable(f"{key}, which is changed under a condition")
    if key.startswith("self."):
        path = attribute(name("self"), key.removeprefix("self."))
        nothing = [value for value in values if isinstance(value, Known) and value.value is None]
        if modules and len(modules) + len(nothing) == len(values):
            optional = bool(nothing) or any(module.optional for module in modules)
            return Instance(tuple(way for module in modules for way in module.made), path, optional)
        return Code(
            path,
            all(each.is_static for each in values),
            optional=any(each.may_be_none for each in values),
        )
    for value, statements in sides:
        new = value.code()
        if not (isinstance(value, Code) and isinstance(new, ast.Name) and new.id == key):
            # What comes after may need it as it looks
            lies = isinstance(value, Code) and value.transposed
            new = call(attribute(new, "contiguous")) if lies else new
            statements.append(ast.Assign([name(key, store=True)], new))
    optional = any(each.may_be_none for each in values)
    static = all(each.is_static for each in values)
    return Code(name(key), static, form=sequence_of_all(values), optional=optional)
