"""Objects of settings that a constructor makes of its config in ways that look at both, by the names
that a class takes say: each setting is the field that it changes with.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.object_values import Config
from onboard.codegen.translate.language.records import RECORDED, Record, in_record
from onboard.codegen.translate.language.trees.syntax import call, name
from onboard.codegen.translate.language.values import Code, Known, Value

_PLAIN = (bool, int, float, str, type(None))
_FACTORS = (2, 3, 4)


def made_by_method(owner: Config, attr: str, args: Args, frame: Frame) -> Record | None:
    """Return what a method of the config gives in a constructor; None where that is no such object."""
    if args.stars or not args.known() or not _in_constructor(frame):
        return None
    given: list[Any] = [each.value for each in args.positional]  # type: ignore[attr-defined]
    named = {key: each.value for key, each in args.keywords.items()}  # type: ignore[attr-defined]
    return _probed(lambda config: getattr(config, attr)(*given, **named), owner, frame)


def made_by_call(node: ast.Call, frame: Frame) -> Record | None:
    """Return what a call in a constructor gives that reads one config and names of the file; None
    where that is no such object.
    """
    read = {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
    local = {key: value for key, value in frame.env.values.items() if key in read}
    configs = [(key, value) for key, value in local.items() if isinstance(value, Config)]
    if len(configs) != 1 or len(local) != 1 or not _in_constructor(frame):
        return None
    [(key, owner)], code = configs, compile(ast.unparse(node), "<settings>", "eval")
    return _probed(lambda config: eval(code, {**frame.source.namespace, key: config}), owner, frame)


def _in_constructor(frame: Frame) -> bool:
    return frame.kind == "init" and frame.translator.specialised


def _probed(make: Callable[[Any], Any], owner: Config, frame: Frame) -> Record | None:
    """Return the object that is made of a config with what of it is a constant, or follows from one
    or two fields; what else it keeps nothing may read.
    """
    found = _settings(make, owner.obj)
    if found is None:
        return None
    changed = [
        (field, item, made)
        for field, item in _others(owner.obj)
        if (made := _settings(make, item)) is not None
    ]
    held = _not_probed(owner.obj, {field for field, _, _ in changed})
    entries: dict[str, Value] = {}
    for key, value in found.items():
        moved = {field for field, _, other in changed if other.get(key) != value}
        held |= {field for field in moved if _field(owner.obj, field) is None}
        given = [(item, other.get(key)) for field, item, other in changed if field not in held]
        code = _of_fields(sorted(moved - held), [(owner.obj, value), *given])
        if code is not None:
            entries[key] = Code(code, static=True)
        elif moved <= held:
            entries[key] = Known(value)
            held |= {key} if getattr(owner.obj, key, value) == value else set()
    for field in sorted(held):
        value = getattr(owner.obj, field, found.get(field))
        frame.translator.guard(_stays(owner, field, value), frame)
    return Record(entries, owner.expr)


def _not_probed(config: Any, probed: set[str]) -> set[str]:
    """Return the fields of a config of which no other value was tried with success."""
    return {
        field
        for field, value in config.to_dict().items()
        if field not in probed and isinstance(value, _PLAIN) and hasattr(config, field)
    }


def _of_fields(moved: list[str], given: list[tuple[Any, Any]]) -> ast.expr | None:
    """Return the field, multiple of one, product or quotient of two that is the value given with each
    config; None where none is.
    """
    for text in _formulas(moved, *given[0]):
        code = compile(text, "<setting>", "eval")
        if all(_value(code, config) == value for config, value in given):
            return ast.parse(text, mode="eval").body
    return None


def _formulas(moved: list[str], config: Any, value: Any) -> Iterator[str]:
    fields = [f"{ast.unparse(in_record(field).expr)}" for field in moved]
    if len(fields) == 1:
        yield fields[0]
        first = _field(config, moved[0])
        if type(first) is type(value) is int and first and value % first == 0:
            yield f"{fields[0]} * {value // first}"
    if len(fields) == 2:
        one, two = fields
        yield from (f"{one} * {two}", f"{one} // {two}", f"{two} // {one}")


def _value(code: Any, config: Any) -> Any:
    try:
        return eval(code, {RECORDED: config})
    except Exception:  # a division by zero, fields that are no numbers
        return code


def _stays(owner: Config, key: str, value: Any) -> ast.expr:
    """Return the test of a field that has this value here: what another one makes is not known."""
    known = ast.Constant(value)
    given = call(name("getattr"), owner.expr, ast.Constant(key), known)
    return ast.Compare(given, [ast.Is() if value is None else ast.Eq()], [known])


def _field(config: Any, key: str) -> Any:
    return getattr(config, key, None)


def _settings(make: Callable[[Any], Any], config: Any) -> dict[str, Any] | None:
    """Return what an object keeps, constants all; None where it is something else."""
    try:
        made = make(deepcopy(config))
        computed = [key for key, item in vars(type(made)).items() if isinstance(item, property)]
        kept = {**vars(made), **{key: getattr(made, key) for key in computed}}
    except Exception:  # it refuses such a config
        return None
    known = isinstance(made, nn.Module | PretrainedConfig | type)
    return kept if not known and all(isinstance(item, _PLAIN) for item in kept.values()) else None


def _others(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield configs that differ from one in one field each."""
    for field, value in config.to_dict().items():
        for other in _changed(value):
            copy = deepcopy(config)
            setattr(copy, field, other)
            yield field, copy


def _changed(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * factor + (value == 0) for factor in _FACTORS]
    return [8, True, "other"] if value is None else [f"{value}_2"] if isinstance(value, str) else []
