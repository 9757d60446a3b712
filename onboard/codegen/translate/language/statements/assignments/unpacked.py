"""What the targets of a tuple are assigned."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from onboard.codegen.translate.language.expressions.module_lists import modules_of_row
from onboard.codegen.translate.language.forms import COMPLEX, LIST
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.holes import Hole, Result
from onboard.codegen.translate.language.sequences import item_in
from onboard.codegen.translate.language.trees.syntax import Untranslatable, name
from onboard.codegen.translate.language.values import (
    Code,
    Half,
    Items,
    Known,
    Unread,
    Value,
)


def unpacked(
    targets: list[ast.expr], value: Value, frame: Frame, origin: ast.AST
) -> Iterator[tuple[ast.expr, Value]]:
    """Yield targets and what each is assigned, but for those that have their values already."""
    if isinstance(value, Result) and (names := _hole_names(targets, value)) is not None:
        bound = frame.bind_result(value, names, origin)
        assert isinstance(bound, Items)
        for target, item in zip(targets, bound.items, strict=True):
            assert isinstance(target, ast.Name)
            frame.env.values[target.id] = item
        return
    value = frame.settle(value)
    value = modules_of_row(value) or value
    if isinstance(value, Known) and isinstance(value.value, tuple | list):
        value = Items(tuple(map(Known, value.value)))
    if isinstance(value, Items):
        targets, value = _starred(targets, value)
    match value:
        case Items(items=items) if len(items) == len(targets):
            yield from _of_items(targets, items, frame, origin)
        case Code(form=form) if form == COMPLEX and len(targets) == 2:
            yield from _of_items(targets, (Half(value, 0), Half(value, 1)), frame, origin)
        case Code():
            yield from _of_code(targets, value, frame, origin)
        case Unread():
            yield from ((target, value) for target in targets)
        case _:
            raise Untranslatable(f"unpacking at {frame.source.location(origin)}")


def _starred(targets: list[ast.expr], value: Items) -> tuple[list[ast.expr], Items]:
    """Return targets without a star, which is assigned a list of the items that it stands for."""
    stars = [place for place, target in enumerate(targets) if isinstance(target, ast.Starred)]
    if len(stars) != 1 or len(value.items) < len(targets) - 1:
        return targets, value
    (start,), rest = stars, len(value.items) - len(targets) + 1
    (*before, star), after = targets[: start + 1], targets[start + 1 :]
    assert isinstance(star, ast.Starred)
    taken = Items(value.items[start : start + rest], kind=LIST)
    items = (*value.items[:start], taken, *value.items[start + rest :])
    return [*before, star.value, *after], Items(items)


def _hole_names(targets: list[ast.expr], result: Result) -> list[str] | None:
    """Return the target names of the result's parts when each part has one."""
    if not (isinstance(result.shape, Items) and len(result.shape.items) == len(targets)):
        return None
    names = {}
    for target, item in zip(targets, result.shape.items, strict=True):
        if not isinstance(target, ast.Name) or not isinstance(item, Hole | Known):
            return None
        if isinstance(item, Hole):
            names[item.index] = target.id
    return [names[index] for index in range(result.holes)] if len(names) == result.holes else None


def _of_items(
    targets: list[ast.expr], items: tuple[Value, ...], frame: Frame, origin: ast.AST
) -> Iterator[tuple[ast.expr, Value]]:
    """Yield one by one, or assign in one statement when a later item reads an earlier target."""
    if any(isinstance(target, ast.Subscript) for target in targets):
        items = tuple(_kept(item, frame, origin) for item in items)
    stores = {target.id for target in targets if isinstance(target, ast.Name)}
    reads = {
        node.id
        for item in items[1:]
        if isinstance(item, Code)
        for node in ast.walk(item.expr)
        if isinstance(node, ast.Name)
    }
    if stores & reads and all(isinstance(item, Code) for item in items):
        elements = [item.expr for item in items if isinstance(item, Code)]
        if any(
            ast.unparse(target) != ast.unparse(item)
            for target, item in zip(targets, elements, strict=True)
        ):
            frame.emit(ast.Assign([_store_tuple(targets)], ast.Tuple(elements, ast.Load())), origin)
        for target, item in zip(targets, items, strict=True):
            assert isinstance(target, ast.Name)
            assert isinstance(item, Code)
            frame.env.values[target.id] = replace(item, expr=name(target.id))
        return
    yield from zip(targets, items, strict=True)


def _kept(item: Value, frame: Frame, origin: ast.AST) -> Value:
    """Return an item that may lie in a list or a dict which the assignment changes, by a name of its
    own.
    """
    if not isinstance(item, Code) or item.static or not frame.translator.specialised:
        return item
    kept = frame.fresh("item")
    frame.bind(kept, item, origin)
    return frame.env.values[kept]


def _store_tuple(targets: list[ast.expr]) -> ast.Tuple:
    return ast.Tuple([_stored(target) for target in targets], ast.Store())


def _stored(target: ast.expr) -> ast.expr:
    if isinstance(target, ast.Tuple):
        return _store_tuple(target.elts)
    if isinstance(target, ast.Starred):
        return ast.Starred(_stored(target.value), ast.Store())
    if not isinstance(target, ast.Name):
        raise Untranslatable(f"unpacking into {ast.unparse(target)}")
    return name(target.id, store=True)


def _of_code(
    targets: list[ast.expr], value: Code, frame: Frame, origin: ast.AST
) -> Iterator[tuple[ast.expr, Value]]:
    """Unpack a run-time tuple; parts of a transposed whole (chunks of the last dimension) are
    transposed too.
    """
    attributes = [target for target in targets if isinstance(target, ast.Attribute)]
    known = replace(item_in(value.expr, value), transposed=value.transposed)
    names = [
        name(f"{item.attr}_value", True) if item in attributes else _stored(item)
        for item in targets
    ]
    frame.emit(ast.Assign([ast.Tuple(list(names), ast.Store())], value.expr), origin)
    for target, part in zip(targets, names, strict=True):
        inner = [item.id for item in ast.walk(part) if isinstance(item, ast.Name)]
        now = replace(known, form=LIST) if isinstance(part, ast.Starred) else known
        frame.env.values.update({item: replace(now, expr=name(item)) for item in inner})
        if not isinstance(part, ast.Name):
            continue
        if target in attributes:
            yield target, frame.env.values[part.id]
