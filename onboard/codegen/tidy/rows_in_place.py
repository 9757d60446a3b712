"""Rows of tensors: those of a table are looked up by their positions, those that norms get are made
where these are called.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy

from onboard.codegen.translate.language.trees.cleanup import changed, places_read
from onboard.codegen.translate.language.trees.syntax import attribute, call, name

_RESHAPES = ("view", "reshape")


def with_rows_in_place(body: Sequence[ast.stmt], norms: Collection[str]) -> list[ast.stmt]:
    """Return statements that flatten tensors to rows where a norm gets them, if its result has the
    shape of one of them again: `s = y.shape; x = x.reshape(-1, x.shape[-1]); x = self.norm(x,
    y.reshape(-1, y.shape[-1])).reshape(s)` is `x = self.norm(x.flatten(0, -2), y.flatten(0,
    -2)).reshape(y.shape)`.

    `norms`: the attributes that hold norms; `body` stays as it is.
    """
    out: list[ast.stmt] = []
    for index, statement in enumerate(map(deepcopy, body)):
        out.append(statement)
        match statement:
            case ast.Assign(value=ast.Call(func=ast.Attribute()) as value) if (
                found := _restored(value, norms)
            ) is not None:
                norm, shape = found
                rows, made = _rows(norm, out[:-1])
                owner = _shape_of(shape, out[:-1])
                known = None not in rows and owner is not None
                if known and not _read_later(made, statement, body[index + 1 :]):
                    norm.args = [_flat(str(row)) for row in rows]
                    value.args = [attribute(name(str(owner)), "shape")]
                    out = _without(out, made, shape, body[index + 1 :])
    return out


def _flat(variable: str) -> ast.expr:
    rows = [ast.Constant(0), ast.UnaryOp(ast.USub(), ast.Constant(2))]
    return call(attribute(name(variable), "flatten"), *rows)


def _restored(value: ast.Call, norms: Collection[str]) -> tuple[ast.Call, ast.expr] | None:
    """Return a norm's call and the shape that its result gets; None for anything else."""
    match value:
        case ast.Call(
            func=ast.Attribute(
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id="self"), attr=attr), keywords=[]
                ) as norm,
                attr=reshape,
            ),
            args=[shape],
            keywords=[],
        ) if attr in norms and reshape in _RESHAPES:
            return norm, shape
    return None


def _rows(norm: ast.Call, before: Sequence[ast.stmt]) -> tuple[list[str | None], list[str]]:
    """Return the tensors whose rows a norm gets, None for another argument, and the variables that
    were made of these in the statement before.
    """
    rows: list[str | None] = []
    made: list[str] = []
    for arg in norm.args:
        value = arg
        match arg, before[-1:]:
            case ast.Name(id=key), [ast.Assign(targets=[ast.Name(id=last)], value=flat)] if (
                key == last
            ):
                value = flat
                made.append(key)
        rows.append(_flattened(value))
    return rows, made


def _flattened(value: ast.expr) -> str | None:
    """Return x of `x.reshape(-1, x.shape[-1])`."""
    match value:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=key), attr=attr)) if attr in _RESHAPES:
            forms = [f"{key}.{attr}(-1, {size}[-1])" for size in (f"{key}.shape", f"{key}.size()")]
            return (
                key if ast.unparse(value) in [*forms, f"{key}.{attr}(-1, {key}.size(-1))"] else None
            )
    return None


def _shape_of(shape: ast.expr, before: Sequence[ast.stmt]) -> str | None:
    """Return the tensor that has a shape; None where it has another one by now."""
    match shape:
        case ast.Attribute(value=ast.Name(id=key), attr="shape"):
            return key
        case ast.Name(id=variable):
            for place in reversed(range(len(before))):
                match before[place]:
                    case ast.Assign(targets=[ast.Name(id=key)], value=value) if key == variable:
                        owner = _shape_of(value, []) if isinstance(value, ast.Attribute) else None
                        later = {name for item in before[place:-1] for name in changed(item)}
                        return None if owner in later else owner
    return None


def _read_later(made: Sequence[str], statement: ast.Assign, after: Sequence[ast.stmt]) -> bool:
    """Whether rows are read besides."""
    later = {place for item in after for place in places_read(item)}
    return bool((set(made) - changed(statement)) & later)


def _without(
    body: Sequence[ast.stmt], made: Sequence[str], shape: ast.expr, after: Sequence[ast.stmt]
) -> list[ast.stmt]:
    """Return statements without those that made rows, and the shape where nothing else reads it."""
    out = [*body[:-2], body[-1]] if made else list(body)
    read = {place for item in [*out, *after] for place in places_read(item)}
    return [
        item
        for item in out
        if not (
            isinstance(shape, ast.Name)
            and shape.id not in read
            and isinstance(item, ast.Assign)
            and ast.unparse(item.targets[0]) == shape.id
        )
    ]


def with_rows_looked_up(body: Sequence[ast.stmt], tables: Collection[str]) -> list[ast.stmt]:
    """Return statements that look rows of tables up by their positions, where they gather them from
    one copy of the table for each sequence: `table = self.table.repeat(p.shape[0], 1, 1);
    index = p.unsqueeze(-1).repeat(1, 1, table.shape[-1]); torch.gather(table, 1, index)` is
    `self.table[p]`.

    `tables`: the attributes that hold tables [positions, dim]; `body` stays as it is.
    """
    out = [deepcopy(statement) for statement in body]
    known: dict[str, ast.expr] = {}
    for place, statement in enumerate(out):
        out[place] = statement = _Gathered(dict(known), tables).visit(statement)
        for key in changed(statement):
            known = {k: v for k, v in known.items() if key != k and key not in places_read(v)}
        match statement:
            case ast.Assign(targets=[ast.Name(id=key)], value=ast.Call() as value):
                known[key] = value
    return out


class _Gathered(ast.NodeTransformer):
    def __init__(self, known: Mapping[str, ast.expr], tables: Collection[str]) -> None:
        self.known, self.tables = known, tables

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="torch"), attr="gather"),
                args=[ast.Name(id=copies), ast.Constant(value=1), ast.Name(id=index)],
                keywords=[],
            ) if copies in self.known and index in self.known:
                return self._row(copies, self.known[copies], self.known[index]) or node
        return node

    def _row(self, copies: str, table: ast.expr, index: ast.expr) -> ast.expr | None:
        match table:
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Attribute(value=ast.Name(id="self"), attr=attr) as whole,
                    attr="repeat",
                ),
                args=[
                    ast.Subscript(value=ast.Attribute(value=ast.Name(id=rows), attr="shape")),
                    *_,
                ],
            ) if attr in self.tables and ast.unparse(table).endswith(f"({rows}.shape[0], 1, 1)"):
                wanted = f"{rows}.unsqueeze(-1).repeat(1, 1, {copies}.shape[-1])"
                if ast.unparse(index) == wanted:
                    return ast.Subscript(whole, ast.Name(rows, ast.Load()), ast.Load())
        return None
