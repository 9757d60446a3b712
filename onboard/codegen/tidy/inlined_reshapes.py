"""New shapes and types of a value where it is used next, and functions of tensors as their
methods.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from copy import deepcopy

from onboard.codegen.tidy.lines import lines_of
from onboard.codegen.translate.language.trees.cleanup import changed, places_read, places_written

_SHAPES = (
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "transpose",
    "contiguous",
    "squeeze",
    "unsqueeze",
    "to",
    "float",
    "type_as",
)
_PARTS = ("split", "chunk")
_LONG = 5
"""Lines of a call that stands with one argument a line."""


def folded(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return statements in which a value gets its new shape or type where the next statement uses
    it, or where it is made, as long as that one keeps its lines; `body` stays as it is.

    `x = x.flatten(2); return self.proj(x)` is `return self.proj(x.flatten(2))`, and `x = f(y);
    z = g(y); x = x.flatten(2)` is `x = f(y).flatten(2); z = g(y)`.
    """
    out: list[ast.stmt] = []
    for index, statement in enumerate(body):
        place = _made_at(statement, out)
        joined = None if place is None else _joined(out[place], statement, body[index + 1 :])
        if joined is not None and place is not None:
            out[place] = joined
        else:
            out.append(deepcopy(statement))
    return out


def _made_at(statement: ast.stmt, before: Sequence[ast.stmt]) -> int | None:
    """Return the place of the statement that another one may be joined with: the last one, or the
    one that makes the value whose shape or type alone it changes, if what stands between has
    nothing to do with either.
    """
    match statement:
        case ast.Assign(
            targets=[target],
            value=ast.Call(func=ast.Attribute(value=ast.Name(id=variable), attr=attr)),
        ) if attr in _SHAPES + _PARTS:
            own = {variable} | places_written(target)
            touched = own | set(places_read(statement))
        case _:
            return len(before) - 1 if before else None
    for place in reversed(range(len(before))):
        match before[place]:
            case ast.Assign(targets=[ast.Name(id=made)]) if made == variable:
                return place
        if changed(before[place]) & touched or own & set(places_read(before[place])):
            break
    return len(before) - 1 if before else None


def _joined(
    first: ast.stmt, second: ast.stmt, after: Sequence[ast.stmt]
) -> ast.Assign | ast.Return | None:
    """Return two statements as one; None where that changes something or takes more lines."""
    match first, second:
        case (
            ast.Assign(targets=[ast.Name(id=variable)], value=ast.Call() as value),
            ast.Assign() | ast.Return(),
        ) if not isinstance(second.value, ast.Tuple | None) and (
            _is_shape(value)
            or _shapes(second.value, variable)
            or (_is_module_call(value) and _parts(second.value, variable))
        ):
            pass
        case _:
            return None
    if any(isinstance(node, ast.comprehension | ast.Lambda) for node in ast.walk(second)):
        return None
    ended = isinstance(second, ast.Return) or ast.unparse(second.targets[0]) == variable
    if list(places_read(second)).count(variable) != 1 or not (
        ended or variable not in {place for item in after for place in places_read(item)}
    ):
        return None
    joined = ast.copy_location(_Put(variable, value).visit(deepcopy(second)), first)
    assert isinstance(joined, ast.Assign | ast.Return)
    return joined if lines_of([joined]) <= lines_of([second]) else None


def _is_shape(value: ast.expr) -> bool:
    """Whether a value is another one in a new shape or type."""
    match value:
        case ast.Call(func=ast.Attribute(value=ast.Name(), attr=attr)):
            return attr in _SHAPES
    return False


def _shapes(value: ast.expr, variable: str) -> bool:
    """Whether a value is that of a variable in a new shape or type."""
    match value:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=attr)):
            return owner == variable and attr in _SHAPES
    return False


def _parts(value: ast.expr, variable: str) -> bool:
    """Whether a value is what a variable is split into."""
    match value:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=attr)):
            return owner == variable and attr in _PARTS
    return False


def _is_module_call(value: ast.expr) -> bool:
    """Whether a value is `self.x(y)`."""
    match value:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self")), args=[ast.Name()]):
            return not value.keywords
    return False


def with_short_arguments(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return statements in which a parameter in another form that is used once, as an argument of a
    call that has one argument a line, is computed there; `body` stays as it is.
    """
    out: list[ast.stmt] = []
    for index, statement in enumerate(body):
        new = deepcopy(statement)
        while (place := _argument_at(new, out, body[index + 1 :])) is not None:
            made = out.pop(place)
            assert isinstance(made, ast.Assign)
            assert isinstance(made.targets[0], ast.Name)
            new = _Put(made.targets[0].id, made.value).visit(new)
        out.append(new)
    return out


def _argument_at(
    statement: ast.stmt, before: Sequence[ast.stmt], after: Sequence[ast.stmt]
) -> int | None:
    """Return the place of a statement that computes an argument of another one's call, and may do
    so there without any more lines.
    """
    match statement:
        case ast.Assign(targets=[_], value=ast.Call(args=args)) if lines_of([statement]) >= _LONG:
            direct = {item.id for item in args if isinstance(item, ast.Name)}
        case _:
            return None
    later = {place for item in after for place in places_read(item)}
    free = direct - later - set(changed(statement))
    free = {key for key in free if list(places_read(statement)).count(key) == 1}
    written: set[str] = set()
    read: set[str] = set()
    for place in reversed(range(len(before))):
        match before[place]:
            case ast.Assign(targets=[ast.Name(id=made)], value=ast.Call() | ast.UnaryOp() as value):
                trial = _Put(made, value).visit(deepcopy(statement))
                own = set(places_read(value)) - {"torch"}
                fits = made in free - read and not own & written
                if (
                    fits
                    and all(key.startswith("self.") for key in own)
                    and lines_of([trial]) <= lines_of([statement])
                ):
                    return place
        written |= changed(before[place])
        read |= set(places_read(before[place]))
        if not isinstance(before[place], ast.Assign):
            break
    return None


class _Put(ast.NodeTransformer):
    def __init__(self, variable: str, value: ast.expr) -> None:
        self.variable, self.value = variable, value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        put = node.id == self.variable and isinstance(node.ctx, ast.Load)
        return deepcopy(self.value) if put else node


def with_methods(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return statements with `x.split(...)` for `torch.split(x, ...)`; `body` stays as it is."""
    return [_Methods().visit(deepcopy(statement)) for statement in body]


class _Methods(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="torch"), attr=attr),
                args=[ast.Name() as tensor, *args],
            ) if attr in _PARTS:
                method = ast.Attribute(tensor, attr, ast.Load())
                return ast.copy_location(ast.Call(method, args, node.keywords), node)
        return node
