"""Short methods that are called in one place, written there."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy

from onboard.codegen.tidy.lines import lines_of
from onboard.codegen.tidy.reshapes import with_short_shapes
from onboard.codegen.translate.language.state import ClassState, Routine
from onboard.codegen.translate.language.trees import cleanup

_LINES = 30
"""A method of more lines has a name for good reasons."""


def inline_methods(states: Sequence[ClassState]) -> None:
    """Write the short methods of classes, if one statement alone calls them, in its place."""
    for state in states:
        for key in list(state.methods):
            if key != "forward" and lines_of(with_short_shapes(state.methods[key].body)) <= _LINES:
                _inline(state, key, states)


def _inline(state: ClassState, key: str, states: Sequence[ClassState]) -> None:
    method = state.methods[key]
    reads = sum(_count(routine, key) for each in states for routine in each.methods.values())
    if reads != 1 or method.node.decorator_list or not _ends_once(method.body):
        return
    for caller in state.methods.values():
        if caller is not method:
            body = _with_body(caller.body, key, method)
            if body is not None:
                caller.body = cleanup.clean(body)
                del state.methods[key]
                return


def _count(routine: Routine, attr: str) -> int:
    return sum(
        isinstance(node, ast.Attribute) and node.attr == attr
        for statement in routine.body
        for node in ast.walk(statement)
    )


def _ends_once(body: Sequence[ast.stmt]) -> bool:
    """Whether the only `return` is the last statement, and gives something."""
    returns = [node for item in body for node in ast.walk(item) if isinstance(node, ast.Return)]
    return len(returns) == 1 and returns[0] is body[-1] and returns[0].value is not None


def _names(body: Sequence[ast.stmt]) -> set[str]:
    return {node.id for item in body for node in ast.walk(item) if isinstance(node, ast.Name)}


def _with_body(
    body: Sequence[ast.stmt],
    key: str,
    method: Routine,
    below: Sequence[ast.stmt] = (),
) -> list[ast.stmt] | None:
    """Return a caller's statements with those of a method in place of its call; None where it is
    not called there, or names get in the way.

    `below`: what the caller does after these.
    """
    for index, statement in enumerate(body):
        after = [*body[index + 1 :], *below]
        match statement:
            case ast.If(test=test, body=one, orelse=other):
                sides = [_with_body(side, key, method, after) for side in (one, other)]
                if any(side is not None for side in sides):
                    new = ast.If(test, sides[0] or one, sides[1] or other)
                    return [*body[:index], ast.copy_location(new, statement), *body[index + 1 :]]
            case ast.Assign(targets=[target], value=ast.Call() as call) if _calls(call, key):
                written = _written_out(call, method, target, after)
                return None if written is None else _put(body, index, written)
            case ast.Return(value=ast.Call() as call) if _calls(call, key):
                written = _written_out(call, method, None, [])
                return None if written is None else _put(body, index, written)
    return None


def _put(body: Sequence[ast.stmt], index: int, written: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return statements with others, or none, in place of one; the first of them stand where it
    stood.
    """
    for first in written[:1]:
        ast.copy_location(first, body[index])
    return [*body[:index], *written, *body[index + 1 :]]


def _calls(call: ast.Call, key: str) -> bool:
    return ast.unparse(call.func) == f"self.{key}" and not any(
        isinstance(item, ast.Starred) for item in call.args
    )


def _written_out(
    call: ast.Call,
    method: Routine,
    target: ast.expr | None,
    after: Sequence[ast.stmt],
) -> list[ast.stmt] | None:
    """Return a method's statements with a call's arguments in them; None where a name of theirs
    has another meaning at the call.
    """
    given = dict(zip(method.parameters, call.args, strict=False))
    given |= {str(item.arg): item.value for item in call.keywords}
    if given.keys() != set(method.parameters):
        return None
    read_after = {place for item in after for place in cleanup.places_read(item)}
    targets = _names([ast.Expr(target)]) if target is not None else set()
    own = set(_assigned(method.body))
    known: dict[str, ast.expr] = {}
    before: list[tuple[str, ast.expr]] = []
    for key, value in given.items():
        moved = isinstance(value, ast.Name) and (value.id not in read_after or value.id in targets)
        if moved or (key not in own and _may_move(value, key, method.body)):
            known[key] = value
        else:
            before.append((key, value))
            own.add(key)
    last = method.body[-1]
    assert isinstance(last, ast.Return)
    assert last.value is not None
    known |= _results(last.value, target, own - known.keys(), set(_read(known.values())))
    kept = set(_read(known.values()))
    fresh = own - known.keys()
    for key, value in before:
        kept |= set(_read([value])) - {key}
    places = [value.id for value in known.values() if isinstance(value, ast.Name)]
    if fresh & (kept | (read_after - targets)) or len(set(places)) != len(places):
        return None
    first = [ast.Assign([ast.Name(key, ast.Store())], deepcopy(item)) for key, item in before]
    body = [*first, *(_Renamed(known).visit(deepcopy(item)) for item in method.body)]
    result = body[-1].value
    if target is None:
        return body
    if ast.unparse(result) == ast.unparse(target):
        return body[:-1]
    return [*body[:-1], ast.copy_location(ast.Assign([target], result), body[-1])]


def _may_move(value: ast.expr, key: str, body: Sequence[ast.stmt]) -> bool:
    """Whether an argument is a variable, an attribute of `self`, or a number, or what a method
    reads once, of the caller's variables.
    """
    if isinstance(value, ast.Name | ast.Constant):
        return True
    places = list(cleanup.places_read(value))
    reads = [place for item in body for place in cleanup.places_read(item)].count(key)
    return ast.unparse(value) in places or (reads == 1 and not set(places) & set(_assigned(body)))


def _assigned(body: Sequence[ast.stmt]) -> Iterator[str]:
    for node in (node for item in body for node in ast.walk(item)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _read(values: Collection[ast.expr]) -> Iterator[str]:
    for value in values:
        yield from cleanup.places_read(value)


def _results(
    returned: ast.expr, target: ast.expr | None, own: set[str], read: set[str]
) -> dict[str, ast.expr]:
    """Return the caller's variables for those that a method returns, unless the method reads
    them.
    """
    pairs: list[tuple[ast.expr, ast.expr]] = []
    match returned, target:
        case ast.Tuple(elts=values), ast.Tuple(elts=places) if len(values) == len(places):
            pairs = list(zip(values, places, strict=True))
        case ast.Name(), ast.Name():
            pairs = [(returned, target)]
    return {
        value.id: ast.Name(place.id, ast.Load())
        for value, place in pairs
        if isinstance(value, ast.Name) and isinstance(place, ast.Name)
        if value.id in own and place.id not in read and place.id != "_"
    }


class _Renamed(ast.NodeTransformer):
    def __init__(self, known: Mapping[str, ast.expr]) -> None:
        self.known = known

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self.known.get(node.id)
        if value is None:
            return node
        if isinstance(node.ctx, ast.Store):
            assert isinstance(value, ast.Name)
            return ast.Name(value.id, ast.Store())
        return deepcopy(value)
