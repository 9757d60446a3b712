"""Statements that pick some tokens' rows, compute with these, and put what they get in their places.

How many rows there are depends on numbers, so that no graph of it has a fixed size. The same comes of
computing with all rows, and of leaving the others as they are. Where a computation mixes rows, that
is not so: the proof sees it.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch

from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.trees.syntax import attribute, call, name

_FLAT = ("squeeze", "flatten", "view", "reshape")
_TRUTHS = ("any", "all", "bool", "eq", "ge", "gt", "le", "lt", "logical_and", "isin")
_COUNTS = (0, 1, 2, 100_000)
"""Of rows, of which a condition that asks for any may have any number."""


class _OtherwiseError(Exception):
    """Statements that do something else with what is picked."""


@dataclass(frozen=True)
class Picked:
    """Rows that are picked by a mask: the names of their numbers, and of places in each, if any."""

    mask: str
    rows: str
    places: str | None = None
    pairs: bool = False
    """`rows` is a table of both, [picked, 2]."""
    truths: bool = False
    """`rows` is the mask itself."""

    def role(self, node: ast.expr) -> str | None:
        """Return what an index is: `rows`, `places`, or nothing of these."""
        if not self.pairs:
            return {self.rows: "rows", self.places: "places"}.get(getattr(node, "id", ""))
        match node:
            case ast.Subscript(
                value=ast.Name(id=self.rows),
                slice=ast.Tuple(elts=[ast.Slice(), ast.Constant(value=0 | 1 as column)]),
            ):
                return "places" if column else "rows"
        return None

    def mentioned(self, node: ast.AST) -> bool:
        """Whether anything of it is read."""
        return any(
            isinstance(each, ast.Name) and each.id in (self.rows, self.places)
            for each in ast.walk(node)
        )

    def of_rows(self) -> ast.expr:
        """Return whether each row is picked, [rows, 1]."""
        if self.truths:
            return ast.parse(f"{self.mask}.flatten()[:, None]", mode="eval").body
        text = f"{self.mask}.reshape({self.mask}.shape[0], -1).any(dim=-1, keepdim=True)"
        return ast.parse(text, mode="eval").body


class PickedRows(Mechanism):
    """`rows, places = torch.where(chosen == number)`, and what is done with them."""

    def instead(self, statements: Sequence[ast.stmt], frame: Frame) -> Sequence[ast.stmt] | None:
        """The same of all rows, from which those that are picked are taken."""
        if not frame.translator.specialised or frame.kind == "init":
            return None
        found = _picked(statements, frame.fresh)
        if found is None:
            return None
        begin, picked = found
        try:
            dense = [deepcopy(begin), *_of_all(statements[1:], picked)]
        except _OtherwiseError:
            return None
        for node in (each for statement in dense for each in ast.walk(statement)):
            ast.copy_location(node, statements[0])
            if isinstance(node, ast.stmt):
                node.col_offset = -1  # no mixture begins there
        return dense


def _picked(statements: Sequence[ast.stmt], fresh: object) -> tuple[ast.stmt, Picked] | None:
    """Return the statement that makes the mask of what the first statement picks, and that."""
    match statements[0]:
        case ast.Assign(targets=[target], value=value):
            pass
        case _:
            return None
    if isinstance(target, ast.Name) and _is_truth(value):
        picked = Picked(target.id, target.id, truths=True)
        used = _puts(statements[1:], picked) and _takes(statements[1:], picked)
        return (statements[0], picked) if used else None
    mask, several = _asked(value)
    if mask is None or not callable(fresh):
        return None
    variable = str(fresh("picked"))
    match target:
        case ast.Tuple(elts=[ast.Name(id=rows), ast.Name(id=places)]) if several:
            picked = Picked(variable, rows, places)
            if not _puts(statements[1:], picked):
                picked, mask = Picked(variable, places, rows), attribute(mask, "T")
        case ast.Tuple(elts=[ast.Name(id=rows)]) if several:
            picked = Picked(variable, rows)
        case ast.Name(id=rows) if not several:
            picked = Picked(variable, rows, pairs=_is_table(value))
        case _:
            return None
    if not _puts(statements[1:], picked):
        return None
    return ast.Assign([name(variable, store=True)], mask), picked


def _is_truth(value: ast.expr) -> bool:
    """Whether an expression makes a mask, by what it says."""
    match value:
        case ast.Compare(ops=[ast.Is() | ast.IsNot() | ast.In() | ast.NotIn()]):
            return False
        case ast.Compare(ops=[_]):
            return True
        case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr(), right=right):
            return _is_truth(left) or _is_truth(right)
        case ast.Call(func=ast.Attribute(attr=attr)):
            return attr in _TRUTHS
    return False


def _asked(value: ast.expr) -> tuple[ast.expr | None, bool]:
    """Return the mask whose places an expression looks up, and whether it gives one tensor a dimension."""
    match value:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="where"), args=[mask]):
            return mask, True
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="torch"), attr="nonzero"),
            args=[mask],
            keywords=keywords,
        ):
            return mask, _as_tuple(keywords)
        case ast.Call(func=ast.Attribute(value=mask, attr="nonzero"), args=[], keywords=keywords):
            return mask, _as_tuple(keywords)
        case ast.Call(func=ast.Attribute(value=inner, attr=attr)) if attr in _FLAT:
            found, several = _asked(inner)
            return (None if several else found), False
        case ast.Subscript(value=inner, slice=ast.Constant(value=0)):
            found, several = _asked(inner)
            return (found if several else None), False
    return None, False


def _as_tuple(keywords: Sequence[ast.keyword]) -> bool:
    return any(each.arg == "as_tuple" and ast.unparse(each.value) == "True" for each in keywords)


def _is_table(value: ast.expr) -> bool:
    """Whether an expression is a table of places, with a column for each dimension."""
    return isinstance(value, ast.Call) and ast.unparse(value.func).endswith("nonzero")


def _puts(statements: Sequence[ast.stmt], picked: Picked) -> bool:
    """Whether statements put something in the places of picked rows."""
    return any(_target(node, picked) is not None for each in statements for node in ast.walk(each))


def _takes(statements: Sequence[ast.stmt], picked: Picked) -> bool:
    """Whether statements compute with picked rows, and do not just fill them with something."""
    return any(
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Load)
        and _is_rows(node.slice, picked)
        for each in statements
        for node in ast.walk(each)
    )


def _target(node: ast.AST, picked: Picked) -> tuple[ast.expr, ast.expr, bool] | None:
    """Return in which tensor a statement puts what in the places of picked rows, and whether it adds
    it.
    """
    match node:
        case ast.AugAssign(
            target=ast.Subscript(value=whole, slice=index), op=ast.Add(), value=value
        ):
            return (whole, value, True) if _is_rows(index, picked) else None
        case ast.Assign(targets=[ast.Subscript(value=whole, slice=index) as target], value=value):
            if not _is_rows(index, picked):
                return None
            match value:
                case ast.BinOp(left=left, op=ast.Add(), right=right) if ast.unparse(
                    left
                ) == ast.unparse(target):
                    return whole, right, True
            return whole, value, False
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=whole, attr="index_add_"),
                args=[ast.Constant(value=0), index, value],
                keywords=[],
            )
        ):
            return (whole, value, True) if _is_rows(index, picked) else None
    return None


def _is_rows(index: ast.expr, picked: Picked) -> bool:
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    whole = all(ast.unparse(each) in (":", "...") for each in parts[1:])
    return picked.role(parts[0]) == "rows" and whole


def _of_all(statements: Sequence[ast.stmt], picked: Picked) -> list[ast.stmt]:
    """Return what statements do, of all rows."""
    out: list[ast.stmt] = []
    for statement in statements:
        out += _one_of_all(statement, picked)
    return out


def _one_of_all(statement: ast.stmt, picked: Picked) -> list[ast.stmt]:
    if (put := _target(statement, picked)) is not None:
        whole, value, added = put
        return [_put(whole, _Dense(picked).expression(value), picked, added=added)]
    if not picked.mentioned(statement):
        return [statement]
    match statement:
        case ast.If(test=test, body=body, orelse=orelse):
            if picked.mentioned(test):
                return _of_all(body if _if_there_are_any(test, picked) else orelse, picked)
            inside, other = _of_all(body, picked), _of_all(orelse, picked)
            return [ast.If(test, inside or [ast.Pass()], other)]
        case ast.Assign(targets=targets, value=value) if not any(map(picked.mentioned, targets)):
            return [ast.Assign(targets, _Dense(picked).expression(value))]
        case ast.AugAssign(target=ast.Name() as target, op=operator, value=value):
            return [ast.AugAssign(target, operator, _Dense(picked).expression(value))]
    raise _OtherwiseError


def _put(whole: ast.expr, value: ast.expr, picked: Picked, *, added: bool) -> ast.stmt:
    """Return the assignment that puts rows [rows, ...] in their places of a tensor."""
    target = deepcopy(whole)
    target.ctx = ast.Store()  # type: ignore[attr-defined]
    if isinstance(value, ast.Constant):
        raise _OtherwiseError
    if picked.truths:  # which may be one for each number, not for each row
        value = _in_rows(value, picked)
    if added:
        others = ast.UnaryOp(ast.Invert(), picked.of_rows())
        kept = call(attribute(value, "masked_fill"), others, ast.Constant(0.0))
        made = ast.BinOp(whole, ast.Add(), call(attribute(kept, "view_as"), whole))
        return ast.Assign([target], made)
    before = _in_rows(whole, picked) if picked.truths else whole
    chosen = call(attribute(name("torch"), "where"), picked.of_rows(), value, before)
    return ast.Assign([target], call(attribute(chosen, "view_as"), whole))


def _in_rows(whole: ast.expr, picked: Picked) -> ast.expr:
    """Return a tensor [places of a mask, size]; of one number a place, the size is 1."""
    places = call(attribute(name(picked.mask), "numel"))
    return call(attribute(whole, "reshape"), places, ast.UnaryOp(ast.USub(), ast.Constant(1)))


def _flat(whole: ast.expr, picked: Picked) -> ast.expr:
    """Return a tensor with one row for each place of a mask."""
    last = ast.BinOp(call(attribute(name(picked.mask), "dim")), ast.Sub(), ast.Constant(1))
    return call(attribute(whole, "flatten"), ast.Constant(0), last)


def _if_there_are_any(test: ast.expr, picked: Picked) -> bool:
    """Whether a condition that asks for nothing but whether rows are picked holds if some are."""
    asked = {each.id for each in ast.walk(test) if isinstance(each, ast.Name)}
    if not asked <= {picked.rows, picked.places, "len", "torch", "bool"}:
        raise _OtherwiseError
    truths = []
    for count in _COUNTS:
        number = torch.ones((count, 2) if picked.pairs else count)
        mask = torch.arange(_COUNTS[-1]) < count
        given = mask if picked.truths else number
        known = {key: given for key in (picked.rows, picked.places) if key}
        truths.append(bool(eval(ast.unparse(test), {"torch": torch, **known})))  # of sizes alone
    if truths[1:] != [not truths[0]] * len(truths[1:]):
        raise _OtherwiseError
    return truths[1]


class _Dense(ast.NodeTransformer):
    """An expression of picked rows as one of all rows."""

    def __init__(self, picked: Picked) -> None:
        self.picked = picked

    def expression(self, node: ast.expr) -> ast.expr:
        """Return the expression of all rows; raise where it does something else with numbers."""
        made: ast.expr = self.visit(deepcopy(node))
        if self.picked.truths:
            return made  # a mask is there still
        if self.picked.mentioned(made):
            raise _OtherwiseError
        return made

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        roles = [self.picked.role(each) for each in parts]
        whole: ast.expr = self.visit(node.value)
        if roles[0] != "rows":
            if any(roles):
                raise _OtherwiseError
            node.value = whole
            return node
        rest = parts[1:]
        if roles[1:2] == ["places"]:
            others = ast.UnaryOp(ast.Invert(), name(self.picked.mask))
            kept = call(attribute(whole, "masked_fill"), others, ast.Constant(0.0))
            whole, rest = call(attribute(kept, "sum"), dim=ast.Constant(-1)), rest[1:]
        elif self.picked.truths:
            whole = _flat(whole, self.picked)
        if any(map(self.picked.mentioned, rest)):
            raise _OtherwiseError
        every = ast.Slice()
        return (
            ast.Subscript(whole, ast.Tuple([every, *rest], ast.Load()), ast.Load())
            if rest
            else whole
        )

    def visit_Call(self, node: ast.Call) -> ast.expr:
        match node:
            case ast.Call(
                func=ast.Attribute(value=whole, attr="index_select"),
                args=[ast.Constant(value=0), index],
            ) if self.picked.role(index) == "rows":
                made: ast.expr = self.visit(whole)
                return made
        self.generic_visit(node)
        return node
