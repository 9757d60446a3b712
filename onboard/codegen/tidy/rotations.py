"""Rotations as the ops do them: of queries and keys in one go, of a head's first channels without
a cut, as the ops pass the other channels on themselves.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

from onboard.analysis.spec_blocks import RopeParameters
from onboard.codegen.translate.language.trees.cleanup import places_read
from onboard.codegen.translate.language.trees.syntax import attribute, call, constant, name, op

_ROPE = "torch.ops.onboard.torch_rope_with_"


def with_paired_rotations(
    body: Sequence[ast.stmt], singles: Mapping[str, RopeParameters]
) -> list[ast.stmt]:
    """Return statements that turn two tensors by one op where neighbours turn one each by the same
    tables; `body` stays as it is.

    `singles`: the functions that turn one tensor.
    """
    out: list[ast.stmt] = []
    for statement in map(deepcopy, body):
        if isinstance(statement, ast.If | ast.For | ast.While):
            statement.body = with_paired_rotations(statement.body, singles)
            statement.orelse = with_paired_rotations(statement.orelse, singles)
        paired = _paired(out[-1], statement, singles) if out else None
        if paired is not None:
            out[-1] = paired
        else:
            out.append(statement)
    return out


def _paired(
    first: ast.stmt, second: ast.stmt, singles: Mapping[str, RopeParameters]
) -> ast.stmt | None:
    """Return `a, b = op(x, y, table)` for `a = f(x, cos, sin); b = f(y, cos, sin)`."""
    match first, second:
        case (
            ast.Assign(
                targets=[ast.Name(id=a)],
                value=ast.Call(func=ast.Name(id=key), args=[x, *tables], keywords=[]),
            ),
            ast.Assign(
                targets=[ast.Name(id=b)],
                value=ast.Call(func=ast.Name(id=other), args=[y, *same], keywords=[]),
            ),
        ) if key == other and key in singles and a != b and len(tables) == 2:
            pass
        case _:
            return None
    if list(map(ast.dump, tables)) != list(map(ast.dump, same)) or a in places_read(second):
        return None
    found = singles[key]
    cos, sin = tables[::-1] if found.sin_first else tables
    floats = [call(attribute(table, "float")) for table in (cos, sin)]
    freqs = call(attribute(name("torch"), "complex"), *floats)
    places = ast.Tuple([ast.Name(key, ast.Store()) for key in (a, b)], ast.Store())
    turned = call(op(found.op), x, y, freqs, constant(found.unsqueeze_dim))
    return ast.copy_location(ast.Assign([places], turned), first)


@dataclass
class _Split:
    """A tensor that is cut for a rotation, and what its parts are joined to afterwards."""

    whole: ast.expr
    joined: ast.expr
    statements: list[ast.stmt]
    """Those that cut and join."""


def with_whole_heads(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return statements that rotate whole heads where they cut off what is not rotated, and join it
    again; `body` stays as it is.

    The ops rotate as many channels as the tables have, and cannot have got fewer than these.
    """
    out = [deepcopy(statement) for statement in body]
    for statement in out:
        if isinstance(statement, ast.If):
            statement.body = with_whole_heads(statement.body)
            statement.orelse = with_whole_heads(statement.orelse)
    for rotation in [item for item in out if _is_rotation(item)]:
        assert isinstance(rotation, ast.Assign)
        splits = [_split(part, rotation, out) for part in _rotated(rotation)]
        if all(split is not None for split in splits):
            found = [split for split in splits if split is not None]
            gone = [id(item) for split in found for item in split.statements]
            assert isinstance(rotation.value, ast.Call)
            rotation.targets = [ast.Tuple([split.joined for split in found], ast.Store())]
            rotation.value.args[:2] = [split.whole for split in found]
            out = [item for item in out if id(item) not in gone]
    return out


def _is_rotation(statement: ast.stmt) -> bool:
    """Whether a statement is `q, k = torch.ops.onboard.torch_rope_with_...(q, k, ...)`."""
    match statement:
        case ast.Assign(
            targets=[ast.Tuple(elts=[ast.Name(id=first), ast.Name(id=second)])],
            value=ast.Call(func=function, args=[ast.Name(id=q), ast.Name(id=k), *_]),
        ):
            return ast.unparse(function).startswith(_ROPE) and [first, second] == [q, k] != [q, q]
    return False


def _rotated(rotation: ast.Assign) -> list[str]:
    assert isinstance(rotation.value, ast.Call)
    return [node.id for node in rotation.value.args[:2] if isinstance(node, ast.Name)]


def _split(part: str, rotation: ast.Assign, body: Sequence[ast.stmt]) -> _Split | None:
    """Return how the tensor is cut and joined whose part a rotation gets; None where that is
    another way, or the parts are read besides.
    """
    place = next(index for index, item in enumerate(body) if item is rotation)
    cut = [item for item in body[:place] if _target(item) == part]
    match cut:
        case [ast.Assign(value=ast.Subscript(value=ast.Name() as whole, slice=index))]:
            bounds = _bounds(index)
        case _:
            return None
    if bounds is None or bounds[0] is not None or bounds[1] is None:
        return None
    rests = [item for item in body[:place] if _is_rest(item, whole, bounds[1])]
    if len(rests) != 1 or _changes(whole.id, body[body.index(cut[0]) : place]):
        return None
    rest = _target(rests[0])
    joins = [item for item in body[place + 1 :] if _is_join(item, part, rest)]
    reads = [key for item in body for key in places_read(item)]
    if len(joins) != 1 or reads.count(part) != 2 or reads.count(rest) != 1:
        return None
    between = body[place + 1 : body.index(joins[0])]
    joined = _target(joins[0])
    if any(joined in places_read(item) for item in between if item not in joins):
        return None
    return _Split(whole, ast.Name(joined, ast.Store()), [cut[0], rests[0], joins[0]])


def _target(statement: ast.stmt) -> str:
    """Return x of `x = ...`, "" for anything else."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=variable)]):
            return variable
    return ""


def _bounds(index: ast.expr) -> tuple[str | None, str | None] | None:
    """Return the bounds of a slice of the last dimension; None for anything else."""
    match index:
        case ast.Tuple(elts=[*leading, ast.Slice(lower=lower, upper=upper, step=None)]) if all(
            ast.unparse(item) in ("...", ":") for item in leading
        ):
            whole = len(leading) == 3 or [ast.unparse(item) for item in leading] == ["..."]
            texts = [None if item is None else ast.unparse(item) for item in (lower, upper)]
            return (texts[0], texts[1]) if whole else None
    return None


def _is_rest(statement: ast.stmt, whole: ast.Name, begin: str) -> bool:
    match statement:
        case ast.Assign(value=ast.Subscript(value=ast.Name(id=variable), slice=index)):
            return variable == whole.id and _bounds(index) == (begin, None)
    return False


def _is_join(statement: ast.stmt, part: str, rest: str) -> bool:
    match statement:
        case ast.Assign(targets=[ast.Name()], value=value):
            forms = [f"{pair}, dim=-1" for pair in (f"({part}, {rest})", f"[{part}, {rest}]")]
            return ast.unparse(value) in [f"torch.cat({form})" for form in forms]
    return False


def _changes(variable: str, body: Sequence[ast.stmt]) -> bool:
    """Whether statements give a variable another value."""
    return any(
        isinstance(node, ast.Name) and node.id == variable and isinstance(node.ctx, ast.Store)
        for item in body
        for node in ast.walk(item)
    )
