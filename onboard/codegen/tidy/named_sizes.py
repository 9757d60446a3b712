"""Names for sizes that a function says over and over, where they make its text shorter."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy

from onboard.codegen.tidy.lines import lines_of
from onboard.codegen.tidy.module_calls import parameters_of
from onboard.codegen.translate.language.trees.cleanup import changed, places_read

_FIELD_READS = 3
"""How often a config's field is read before it may get a name."""
_LONG = 5
"""Lines of a call that stands with one argument a line."""
_CONDITIONAL = (
    *(ast.If, ast.IfExp, ast.BoolOp, ast.For, ast.While, ast.comprehension, ast.Lambda),
)


def with_names(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return statements in which repeated fields of the config, products and quotients of sizes
    are named once, as long as that saves lines; `body` stays as it is.
    """
    best = [deepcopy(statement) for statement in body]
    for _ in range(len(best) + 10):
        trials = (
            _named(best, expr, identifier)
            for expr, identifier in _candidates(best)
            if _may_be_named(best, expr)
        )
        shorter = min(trials, key=lines_of, default=best)
        if lines_of(shorter) >= lines_of(best):
            return best
        best = shorter
    return best


def _candidates(body: Sequence[ast.stmt]) -> list[tuple[ast.expr, str]]:
    """Return expressions worth a name, with names that are free."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    counts = Counter(ast.unparse(node) for node in nodes if isinstance(node, ast.expr))
    found: dict[str, tuple[ast.expr, str]] = {}
    for node in nodes:
        identifier = _name_of(node)
        least = _FIELD_READS if isinstance(node, ast.Attribute) else 2
        if identifier and identifier not in used and isinstance(node, ast.expr):
            text = ast.unparse(node)
            if counts[text] >= least:
                found.setdefault(text, (node, identifier))
    return list(found.values())


def _name_of(node: ast.AST) -> str:
    """Return what a size is called; "" for what has no name."""
    match node:
        case ast.Attribute(value=ast.Name(id="config"), attr=field, ctx=ast.Load()):
            return field
        case ast.BinOp(left=left, op=ast.Mult(), right=right) if (
            things := _counted(left)
        ) and _last(right):
            return _product(things, _last(right))
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right) if (
            (things := _counted(left))
            and (others := _counted(right))
            and "_per_" not in things + others
        ):
            return f"{things}_per_{others.removesuffix('s')}"
    return ""


def _product(things: str, size: str) -> str:
    """Return the name of so many things times the size of each: `key_value_heads_dim`."""
    things, per, others = things.partition("_per_")
    found = re.fullmatch(r"(?:(\w+)_)?head_(?:(\w+)_)?dim", size)
    if found is None:
        return f"{things}_{size}{per}{others}"
    kind = found[1] or found[2]
    return f"{kind}_heads_dim{per}{others}" if kind else f"{things}_dim{per}{others}"


def _last(node: ast.expr) -> str:
    match node:
        case ast.Name(id=last):
            return last
        case ast.Attribute(value=ast.Name(id="config" | "self"), attr=last):
            return last
    return ""


def _counted(node: ast.expr) -> str:
    """Return what a number counts: `heads` of `self.num_heads`."""
    found = re.fullmatch(r"(?:num|n)_(\w+)|(\w+s_per_\w+)", _last(node))
    if found is None:
        return ""
    return found[2] or (found[1] if found[1].endswith("s") else f"{found[1]}s")


def _may_be_named(body: Sequence[ast.stmt], expr: ast.expr) -> bool:
    """Whether an expression is computed in any case, and is the same wherever it stands."""
    first = _first(body, expr)
    operands = set(places_read(expr))
    certain = ast.unparse(expr) in {ast.unparse(node) for node in _unconditional(body)}
    changes = any(operands & _written(statement) for statement in body[first:])
    return (certain or _is_of_numbers(expr, body)) and not changes


def _is_of_numbers(expr: ast.expr, body: Sequence[ast.stmt]) -> bool:
    """Whether something is computed with each operand of an expression, or is assigned to it, in
    any case.
    """
    if not isinstance(expr, ast.BinOp):
        return False
    known = {
        ast.unparse(operand)
        for node in _unconditional(body)
        if isinstance(node, ast.BinOp)
        for operand in (node.left, node.right)
    }
    for statement in body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.BinOp):
            known.add(ast.unparse(statement.targets[0]))
    return {ast.unparse(expr.left), ast.unparse(expr.right)} <= known


def _first(body: Sequence[ast.stmt], expr: ast.expr) -> int:
    """Return the place of the first statement with an expression."""
    code = ast.dump(expr)
    return next(
        index
        for index, statement in enumerate(body)
        if any(
            isinstance(node, ast.expr) and ast.dump(node) == code for node in ast.walk(statement)
        )
    )


def _unconditional(nodes: Sequence[ast.AST]) -> Iterator[ast.expr]:
    """Yield the expressions that are computed whatever the config says."""
    for node in nodes:
        if isinstance(node, ast.If | ast.For | ast.While):
            continue
        if isinstance(node, ast.expr):
            yield node
        if not isinstance(node, _CONDITIONAL):
            yield from _unconditional(list(ast.iter_child_nodes(node)))


def _written(statement: ast.stmt) -> set[str]:
    """Return the variables and the attributes of `self` that a statement assigns."""
    return {
        ast.unparse(node)
        for node in ast.walk(statement)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def _named(body: Sequence[ast.stmt], expr: ast.expr, identifier: str) -> list[ast.stmt]:
    """Return statements that name an expression before they use it."""
    first = _first(body, expr)
    out = [_Replaced(expr, identifier).visit(deepcopy(item)) for item in body]
    definition = ast.Assign([ast.Name(identifier, ast.Store())], deepcopy(expr))
    out[first:first] = [ast.copy_location(definition, body[first])]
    return out


class _Replaced(ast.NodeTransformer):
    def __init__(self, expr: ast.expr, identifier: str) -> None:
        self.dump, self.identifier = ast.dump(expr), identifier

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr) and ast.dump(node) == self.dump:
            return ast.Name(self.identifier, ast.Load())
        return super().generic_visit(node)


def with_named_arguments(
    body: Sequence[ast.stmt], parameters: Mapping[str, Sequence[str]]
) -> list[ast.stmt]:
    """Return statements in which a size that makes a constructor's call long has a name before it:
    the one that it has there where it is computed, its own where the call repeats it; `body` stays
    as it is.

    `parameters`: those of the constructors in the file.
    """
    out: list[ast.stmt] = []
    for statement in map(deepcopy, body):
        trials = [[*out, statement]]
        if isinstance(statement, ast.Assign) and lines_of([statement]) >= _LONG:
            taken = _variables(body) | _variables(out)
            trials += _with_argument_named(out, statement, parameters, taken)
        out = min(trials, key=lines_of)
    return out


def _variables(body: Sequence[ast.stmt]) -> set[str]:
    return {node.id for item in body for node in ast.walk(item) if isinstance(node, ast.Name)}


def _with_argument_named(
    before: Sequence[ast.stmt],
    statement: ast.Assign,
    parameters: Mapping[str, Sequence[str]],
    taken: Collection[str],
) -> Iterator[list[ast.stmt]]:
    """Yield statements with an argument of the last one named before it, for each that may be."""
    match statement.value:
        case ast.Call(func=function, args=args, keywords=keywords):
            names = parameters.get(ast.unparse(function)) or parameters_of(function)
        case _:
            return
    values = [*args, *(item.value for item in keywords)]
    called = [*names[: len(args)], *(item.arg for item in keywords)]
    for value, parameter in zip(values, called, strict=False):
        match value:
            case ast.BinOp() if parameter and parameter not in taken:
                new = _Replaced(value, parameter).visit(deepcopy(statement))
                yield [*before, _definition(parameter, value, statement), new]
            case ast.Attribute(value=ast.Name(id="self"), attr=attr) if attr not in taken:
                repeated = [ast.dump(item) for item in values].count(ast.dump(value))
                if repeated >= _FIELD_READS:
                    new = _Replaced(value, attr).visit(deepcopy(statement))
                    yield [*_with_variable(before, value), new]


def _with_variable(before: Sequence[ast.stmt], attribute: ast.Attribute) -> list[ast.stmt]:
    """Return statements whose last assignment of `self.<attr>` assigns a variable of that name,
    too.
    """
    out = list(before)
    text = ast.unparse(attribute)
    for place in reversed(range(len(out))):
        match out[place]:
            case ast.Assign(targets=[target], value=value) if ast.unparse(target) == text:
                kept = ast.Assign([target], ast.Name(attribute.attr, ast.Load()))
                out[place : place + 1] = [
                    _definition(attribute.attr, value, out[place]),
                    ast.copy_location(kept, out[place]),
                ]
                return out
        if text in changed(out[place]):
            break
    return [*out, _definition(attribute.attr, attribute, out[-1])]


def _definition(identifier: str, value: ast.expr, place: ast.stmt) -> ast.stmt:
    named = ast.Assign([ast.Name(identifier, ast.Store())], deepcopy(value))
    return ast.copy_location(named, place)
