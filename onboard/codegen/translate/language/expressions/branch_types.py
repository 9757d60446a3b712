"""What a branch says of its layer's modules: layers of other kinds do not get there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace

from torch import nn

from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.object_values import Instance
from onboard.codegen.translate.language.values import Value


@contextmanager
def narrowed(test: Value, outcome: bool, frame: Frame) -> Iterator[None]:
    """Evaluate a branch that is taken where `test` is `outcome`, knowing which layers of the model
    take it.
    """
    before, items = frame.layers, dict(frame.items)
    frame.items.update(_numbered(test, outcome, frame))
    if frame.kind == "forward" and frame.cls is not None and test.is_static:
        layers = frame.translator.modules_of(frame.cls.cls) if before is None else before
        frame.layers = [layer for layer in layers if _holds(test, layer, frame) in (outcome, None)]
    try:
        yield
    finally:
        frame.layers, frame.items = before, items


@contextmanager
def numbered(node: ast.For, frame: Frame) -> Iterator[None]:
    """Evaluate the body of `for index, item in enumerate(self.modules)`, whose index may tell the
    item's class.
    """
    before = list(frame.numbered)
    match node.target, node.iter:
        case (
            ast.Tuple(elts=[ast.Name(id=index), ast.Name(id=item)]),
            ast.Call(
                func=ast.Name(id="enumerate"),
                args=[ast.Attribute(value=ast.Name(id="self"), attr=attr)],
                keywords=[],
            ),
        ):
            frame.numbered.append((index, item, attr))
    try:
        yield
    finally:
        frame.numbered = before


def _numbered(test: Value, outcome: bool, frame: Frame) -> dict[str, Value]:
    """Return the items of lists of modules, of the classes that get to a branch by their number."""
    found: dict[str, Value] = {}
    for index, item, attr in frame.numbered:
        module = frame.items.get(item, frame.env.values.get(item))
        if frame.cls is None or not test.is_static or not isinstance(module, Instance):
            continue
        owners = frame.translator.modules_of(frame.cls.cls)
        parts = [(owner, *pair) for owner in owners for pair in _pairs(owner, attr)]
        holds = [
            (type(part), _holds(test, owner, frame, **{index: number}))
            for owner, number, part in parts
        ]
        here = {cls for cls, value in holds if value in (outcome, None)}
        elsewhere = {cls for cls, _ in holds} - here
        if here:
            found[item] = replace(
                module, made=tuple(way for way in module.made if way.cls not in elsewhere)
            )
    return found


def _pairs(owner: nn.Module, attr: str) -> list[tuple[int, nn.Module]]:
    parts = getattr(owner, attr, None)
    return list(enumerate(parts)) if isinstance(parts, nn.ModuleList) else []


def _holds(test: Value, layer: nn.Module, frame: Frame, **numbers: int) -> bool | None:
    """Return the value of a static condition in one layer; None where it cannot be known before the
    model runs.
    """
    expr = _Written(frame.out).visit(deepcopy(test.code()))
    names = {**frame.source.namespace, "config": frame.translator.config, "self": layer, **numbers}
    try:
        return bool(eval(ast.unparse(expr), names))
    except (
        AttributeError,
        NameError,
        TypeError,
        KeyError,
        IndexError,
    ):  # it reads arguments, or what others have
        return None


class _Written(ast.NodeTransformer):
    """Puts what a variable was last assigned in its place."""

    def __init__(self, statements: list[ast.stmt]) -> None:
        self.statements = statements

    def visit_Name(self, node: ast.Name) -> ast.expr:
        for index, statement in reversed(list(enumerate(self.statements))):
            match statement:
                case ast.Assign(targets=[ast.Name(id=variable)], value=value) if (
                    variable == node.id
                ):
                    written: ast.expr = _Written(self.statements[:index]).visit(deepcopy(value))
                    return written
        return node


def possible(module: Instance, attr: str, frame: Frame) -> Instance:
    """Return `self.attr` without the classes that it has only in layers that do not get here."""
    if frame.layers is None or frame.cls is None:
        return module
    here = {type(getattr(layer, attr, None)) for layer in frame.layers}
    everywhere = {
        type(getattr(layer, attr, None)) for layer in frame.translator.modules_of(frame.cls.cls)
    }
    made = tuple(way for way in module.made if way.cls not in everywhere - here)
    return replace(module, made=made) if made else module
