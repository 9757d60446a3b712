"""`if torch.isnan(x).any(): limit = ...; x = ...`, `y[x > 0] = x[x > 0]`: an exported graph has no branch on what
a tensor holds, nor as many items as have a property, and chooses the values instead.
"""

from __future__ import annotations

import ast
from functools import reduce

from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.statements.assignments.assign import store
from onboard.codegen.translate.language.trees.syntax import attribute, call, name, same_code
from onboard.codegen.translate.language.values import Code, Value

_ASKED = ("isnan", "isinf", "isfinite")
_COMPARE = ("gt", "ge", "lt", "le", "eq", "ne")


def chosen_instead(node: ast.If, test: Value, frame: Frame) -> bool:
    """Take a branch of repositories' code that gives a tensor other values where some of its
    numbers are none; return whether this is one.
    """
    if not frame.translator.specialised or type(test) is not Code or test.static:
        return False
    match node:
        case ast.If(
            body=[*before, ast.Assign(targets=[ast.Name() as target], value=value)], orelse=[]
        ) if target.id in frame.env.values and (limits := _only_for_it(before, frame)) is not None:
            asked = _as_one(test.expr)
            kept = frame.evaluate(ast.copy_location(name(target.id), node))
            if asked is None or type(kept) is not Code or kept.transposed:
                return False
            for limit, number in limits:
                store(limit, frame.evaluate(number), frame, node)
            made = frame.evaluate(value)
            where = call(attribute(name("torch"), "where"), asked, made.code(), kept.code())
            store(target, Code(where), frame, node)
            return True
    return False


def _only_for_it(body: list[ast.stmt], frame: Frame) -> list[tuple[ast.Name, ast.expr]] | None:
    """Return the variables that statements make, each with its value; None where they do anything
    else, or a variable was there before.
    """
    made = [
        (item.targets[0], item.value)
        for item in body
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name)
    ]
    fresh = len(made) == len(body) and not any(x.id in frame.env.values for x, _ in made)
    return made if fresh else None


def chosen_items(node: ast.Assign, frame: Frame) -> bool:
    """Give a tensor those items of another that a comparison tells, in repositories' code; return
    whether this is one, item by item.
    """
    match node:
        case ast.Assign(
            targets=[ast.Subscript(value=ast.Name() as target, slice=ast.Name() as told)],
            value=ast.Subscript(value=ast.Name() as other, slice=ast.Name(id=again)),
        ) if told.id == again and frame.translator.specialised:
            kept, given, mask = (frame.evaluate(item) for item in (_read(target), other, told))
            tensors = [x for x in (kept, given, mask) if type(x) is Code and not x.transposed]
            if len(tensors) < 3 or not _compares(mask.code(), given.code(), frame):
                return False
            parts = (mask.code(), given.code(), kept.code())
            where = call(attribute(name("torch"), "where"), *parts)
            store(_written(target), Code(where), frame, node)
            return True
    return False


def _read(target: ast.Name) -> ast.Name:
    return ast.copy_location(name(target.id), target)


def _written(target: ast.Name) -> ast.Name:
    return ast.copy_location(name(target.id, store=True), target)


def _compares(mask: ast.expr, given: ast.expr, frame: Frame) -> bool:
    """Whether a variable was last assigned the comparison of a tensor with a number."""
    made = [
        statement.value
        for statement in frame.out
        if isinstance(statement, ast.Assign)
        and ast.unparse(statement.targets[0]) == ast.unparse(mask)
    ]
    match made:
        case [*_, ast.Compare(left=left, comparators=[right])]:
            sides = [left, right]
        case [*_, ast.Call(func=ast.Attribute(attr=attr), args=sides)] if attr in _COMPARE:
            pass
        case _:
            return False
    numbers = [side for side in sides if not same_code(side, given)]
    return len(sides) == 2 and len(numbers) == 1 and _is_number(numbers[0])


def _is_number(side: ast.expr) -> bool:
    """Whether an operand is a constant, or what a config or a module says."""
    names = {item.id for item in ast.walk(side) if isinstance(item, ast.Name)}
    return names <= {"self", "config"} and not any(isinstance(x, ast.Call) for x in ast.walk(side))


def _as_one(test: ast.expr) -> ast.expr | None:
    """Return a test of what numbers tensors hold as a tensor of one truth value; None for others."""
    match test:
        case ast.BoolOp(op=op, values=values):
            parts = [_as_one(item) for item in values]
            both: ast.operator = ast.BitOr() if isinstance(op, ast.Or) else ast.BitAnd()
            known = [part for part in parts if part is not None]
            whole = reduce(lambda one, other: ast.BinOp(one, both, other), known) if known else None
            return whole if len(known) == len(parts) else None
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            part = _as_one(operand)
            return None if part is None else ast.UnaryOp(ast.Invert(), part)
        case ast.Call(func=ast.Attribute(value=inner, attr="item"), args=[], keywords=[]):
            return _as_one(inner)
        case (
            ast.Call(func=ast.Attribute(value=asked, attr="any" | "all"), args=[], keywords=[])
            | ast.Call(
                func=ast.Attribute(value=ast.Name(id="torch"), attr="any" | "all"),
                args=[asked],
                keywords=[],
            )
        ):
            calls = [item.func for item in ast.walk(asked) if isinstance(item, ast.Call)]
            names = {item.attr for item in calls if isinstance(item, ast.Attribute)}
            return test if names & {*_ASKED} else None
    return None
