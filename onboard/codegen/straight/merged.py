"""Recordings of several models as one: what explains the numbers in which they differ."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from onboard.analysis.repository_source import is_imported_from_it
from onboard.analysis.source import class_node
from onboard.codegen.straight.recorders import Recorder
from onboard.codegen.straight.straight_lines import (
    Arithmetic,
    Given,
    Line,
    Made,
    NotStraight,
    Of,
    Own,
    Repeat,
    Size,
    Straight,
)

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Sample:
    """A recording, and what was recorded."""

    straight: Straight
    recorder: Recorder
    dtype: torch.dtype

    @property
    def module(self) -> nn.Module:
        """The module whose forward ran."""
        return self.recorder.module


def merged(samples: Sequence[Sample]) -> Straight:
    """Return the one recording that several are, with what tells them apart by its name.

    Raises:
        NotStraight: they differ in more than numbers, or in a number that nothing explains.
    """
    made = _merge([sample.straight for sample in samples], samples)
    assert isinstance(made, Straight)
    return made


def _merge(values: Sequence[Any], samples: Sequence[Sample]) -> Any:
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        if all(type(value) in (int, float) for value in values):
            return _explained(values, samples)
        if (own := _of_some(values, samples)) is not None:
            return own
        raise NotStraight(f"it does different things ({_shown(values)})")
    if isinstance(first, tuple):
        return _merge_all(values, samples)
    if isinstance(first, slice):
        bounds = [(item.start, item.stop, item.step) for item in values]
        return slice(*_merge_all(bounds, samples))
    if isinstance(first, Line | Made | Arithmetic | Of | Size | Repeat | Straight):
        kept = ("number", "place", "value", "cls")
        names = [item.name for item in fields(first) if item.name not in kept]
        parts = {key: _merge([getattr(v, key) for v in values], samples) for key in names}
        if isinstance(first, Made) and any(item.cls is not first.cls for item in values):
            raise NotStraight("it gives values of different types")
        return replace(first, **parts)
    if all(value == first for value in values):
        return _named(first, samples)
    if type(first) in (int, float, torch.dtype):
        return _explained(values, samples)
    raise NotStraight(f"it does different things ({_shown(values)})")


def _of_some(values: Sequence[Any], samples: Sequence[Sample]) -> Own | None:
    """Return the attribute that some modules give, where it is None in those that give None."""
    named = {value for value in values if isinstance(value, Own)}
    if len(named) != 1 or not all(value is None or value in named for value in values):
        return None
    (own,) = named
    without = [sample.module for v, sample in zip(values, samples, strict=True) if v is None]
    return own if all(_is_none(module, own.path) for module in without) else None


def _is_none(module: nn.Module, path: tuple[Any, ...]) -> bool:
    *parts, name = path
    owner: Any = module
    for part in parts:
        owner = getattr(owner, str(part), None)
    return hasattr(owner, str(name)) and getattr(owner, str(name)) is None


def _merge_all(values: Sequence[tuple[Any, ...]], samples: Sequence[Sample]) -> tuple[Any, ...]:
    if any(len(value) != len(values[0]) for value in values):
        counts = sorted({len(value) for value in values})
        raise NotStraight(f"it takes different numbers of steps ({counts})")
    return tuple(_merge(items, samples) for items in zip(*values, strict=True))


def _shown(values: Sequence[Any]) -> str:
    return " and ".join(dict.fromkeys(str(_short(value))[:60] for value in values))


def _short(value: Any) -> Any:
    return value.target if isinstance(value, Line) else value


def _explained(values: Sequence[Any], samples: Sequence[Sample]) -> Any:
    """Return what each module calls its own of several numbers."""
    if isinstance(values[0], torch.dtype):
        if all(value is sample.dtype for value, sample in zip(values, samples, strict=True)):
            return Of(_of_models_dtype(samples), "dtype")
        raise NotStraight(f"dtypes that differ ({_shown(values)})")
    known = [*_features(samples)]
    for expression, found in _formulas(known, samples):
        if all(_equal(one, other) for one, other in zip(found, values, strict=True)):
            return expression
    raise NotStraight(f"a number that nothing explains ({_shown(values)})")


def _named(value: Any, samples: Sequence[Sample]) -> Any:
    """Return what the code of a module calls a number that all models have: the config may have
    another one.
    """
    if type(value) not in (int, float) or value in _PLAIN:
        return value
    cls: Any = type(samples[0].module)
    read = _attributes_read(cls)
    for name in vars(samples[0].module):
        found = [vars(sample.module).get(name) for sample in samples]
        if name in read and all(type(f) is type(value) and f == value for f in found):
            return Own((name,))
    return value


_PLAIN = (-2, -1, 0, 1, 2)
"""Numbers that are dimensions, halves, squares, ... more often than a size."""


@cache
def _attributes_read(cls: type) -> set[str]:
    """Return the attributes of `self` that the methods of a class read."""
    owners = [owner for owner in cls.__mro__ if is_imported_from_it(owner.__module__)]
    nodes = [node for owner in owners for node in ast.walk(class_node(owner))]
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and ast.unparse(node.value) == "self"
    }


def _of_models_dtype(samples: Sequence[Sample]) -> Any:
    """Return a tensor that has the model's dtype, whatever that is."""
    for place in samples[0].recorder.inputs:
        found = [sample.recorder.inputs.get(place) for sample in samples]
        if all(f is not None and f.dtype is s.dtype for f, s in zip(found, samples, strict=True)):
            return place
    for name, _ in samples[0].module.named_parameters():
        found = [_parameter(sample.module, name) for sample in samples]
        if all(f is not None and f.dtype is s.dtype for f, s in zip(found, samples, strict=True)):
            return Own(tuple(name.split(".")))
    raise NotStraight("the model's dtype, which nothing that it has tells")


def _parameter(module: nn.Module, name: str) -> Any:
    return dict(module.named_parameters(remove_duplicate=False)).get(name)


def _equal(one: Any, other: Any) -> bool:
    if type(one) is int and type(other) is int:
        return one == other
    if type(one) is not type(other):
        return False
    return one == other or math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=0.0)


Feature = tuple[Any, list[Any]]


def _features(samples: Sequence[Sample]) -> Iterator[Feature]:
    """Yield the numbers that a module has, with their values in each sample."""
    first = samples[0]
    for name in vars(first.module):
        yield from _common(Own((name,)), [vars(s.module).get(name) for s in samples])
    for name in first.recorder.numbers:
        yield from _common(Given(name), [s.recorder.numbers.get(name) for s in samples])
    for place, tensor in first.recorder.inputs.items():
        others = [s.recorder.inputs.get(place) for s in samples]
        for dim, size in enumerate(tensor.shape):
            if type(size) is int and all(o is not None and o.dim() > dim for o in others):
                sizes = [other.shape[dim] for other in others if other is not None]
                yield from _common(Size(place, dim), sizes)
    for name in _fields(first.module):
        configs = [getattr(s.module, "config", None) for s in samples]
        yield from _common(Own(("config", name)), [getattr(c, name, None) for c in configs])
    yield from _modules_sizes(samples)


def _modules_sizes(samples: Sequence[Sample]) -> Iterator[Feature]:
    for path, part in samples[0].module.named_children():
        for name, value in vars(part).items():
            if type(value) is int:
                values = [getattr(getattr(s.module, path, None), name, None) for s in samples]
                yield from _common(Own((path, name)), values)


def _fields(module: nn.Module) -> list[str]:
    config = getattr(module, "config", None)
    held = vars(config) if config is not None else {}
    return [key for key, value in held.items() if type(value) in (int, float)]


def _common(expression: Any, values: list[Any]) -> Iterator[Feature]:
    if all(type(value) in (int, float) for value in values):
        yield expression, values


def _formulas(known: Sequence[Feature], samples: Sequence[Sample]) -> Iterator[Feature]:
    """Yield numbers and what is computed of one or two of them, the simplest first."""
    yield from known
    numbers = [(number, [number] * len(samples)) for number in (0, 1, 2, 3, 4)]
    for expression, values in known:
        for op, function in _UNARY:
            yield from _computed(op, (expression,), function, values)
        for number, same in numbers:
            for sign, function in _BINARY.items():
                yield from _computed(sign, (expression, number), function, values, same)
                yield from _computed(sign, (number, expression), function, same, values)
    for one, first in known:
        for other, second in known:
            for sign, function in _BINARY.items():
                yield from _computed(sign, (one, other), function, first, second)
    yield from _edges(samples)


def _edges(samples: Sequence[Sample]) -> Iterator[Feature]:
    """Yield the least and the largest number of the model's dtype."""
    try:
        of = Of(_of_models_dtype(samples), "dtype")
    except NotStraight:
        return
    for edge in ("min", "max"):
        found = [getattr(torch.finfo(sample.dtype), edge) for sample in samples]
        yield Of(Arithmetic("torch.finfo", (of,)), edge), found


_UNARY: list[tuple[str, Callable[..., Any]]] = [
    ("math.sqrt", math.sqrt),
    ("rsqrt", lambda a: 1 / math.sqrt(a)),
    ("power", lambda a: a**-0.5),
    ("inverse", lambda a: 1 / a),
    ("root", lambda a: a**0.5),
]
_BINARY: dict[str, Callable[..., Any]] = {
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "/": lambda a, b: a / b,
}


def _computed(
    op: str, operands: tuple[Any, ...], function: Callable[..., Any], *values: list[Any]
) -> Iterator[Feature]:
    try:
        found = [function(*each) for each in zip(*values, strict=True)]
    except (ArithmeticError, ValueError, TypeError):
        return
    yield _arithmetic(op, operands), found


def _arithmetic(op: str, operands: tuple[Any, ...]) -> Any:
    (first, *_) = operands
    match op:
        case "rsqrt":
            return Arithmetic("/", (1, Arithmetic("math.sqrt", (first,))))
        case "power":
            return Arithmetic("**", (first, -0.5))
        case "inverse":
            return Arithmetic("/", (1, first))
        case "root":
            return Arithmetic("**", (first, 0.5))
    return Arithmetic(op, operands)
