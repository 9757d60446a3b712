"""Calls with hints inside others get lines of their own, and names, where that makes a file shorter.

A model's forward has no effects but its result, so what is computed first does not matter.
"""

from __future__ import annotations

import ast
import keyword
from collections.abc import Iterator
from itertools import count

from onboard.codegen.format import format_python
from onboard.codegen.hints.spans import LAYERS, OPS, Spans

_RARELY = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.NamedExpr)
"""What computes its parts sometimes, or several times."""
_FEW = 3
"""Lines of a statement that is short enough to be read."""


def with_named_lines(text: str) -> str:
    """Return a formatted text with hints whose long statements are several short ones."""
    tried: set[str] = set()
    while (found := _next(text, tried)) is not None:
        key, other = found
        tried.add(key)
        if len(other.splitlines()) <= len(text.splitlines()):
            text = other
    return text


def _next(text: str, tried: set[str]) -> tuple[str, str] | None:
    """Return calls that were not tried, with their place, and the text where they have lines of
    their own.
    """
    for function in _methods(ast.parse(text)):
        for statement in _statements(function):
            for calls in _candidates(statement):
                key = " ".join(map(ast.unparse, (function.args, statement, *calls)))
                if key not in tried:
                    return key, _moved(text, statement, _named(calls, statement, function))
    return None


def _methods(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef):
            yield from (each for each in owner.body if isinstance(each, ast.FunctionDef))


def _statements(function: ast.FunctionDef) -> Iterator[ast.Assign | ast.Return]:
    """Yield assignments and returns of several lines."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.Return) and node.end_lineno != node.lineno:
            yield node


def _candidates(statement: ast.Assign | ast.Return) -> Iterator[list[ast.Call]]:
    """Yield the calls with hints that a statement makes whatever it reads, but for the whole of it:
    those that have no such call in them together, then each.
    """
    value = statement.value
    if value is None or _is_receiver(value):
        return
    found = [each for each in _calls(value) if each is not value]
    inner = [each for each in found if list(_calls(each)) == [each]]
    yield from [inner] if len(inner) > 1 else []
    yield from ([each] for each in found)


def _is_receiver(value: ast.expr) -> bool:
    """Whether an expression is one short chain of methods behind a call with hints."""
    assert value.end_lineno is not None
    if value.end_lineno - value.lineno >= _FEW:
        return False
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if is_hinted(value):
            return False
        value = value.func.value
    return is_hinted(value)


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    if isinstance(node, _RARELY):
        return
    for child in ast.iter_child_nodes(node):
        yield from _calls(child)
    if isinstance(node, ast.Call) and is_hinted(node):
        yield node


def is_hinted(node: ast.expr) -> bool:
    """Whether an expression is a call that says how ranks divide what it computes."""
    return isinstance(node, ast.Call) and any(
        each.arg in (None, "layer_type", "tp_mode") for each in node.keywords
    )


def _named(
    calls: list[ast.Call], statement: ast.stmt, function: ast.FunctionDef
) -> list[tuple[ast.Call, str]]:
    """Return a name for what each call gives, which the function does not have."""
    is_last = isinstance(statement, ast.Return)
    taken = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    taken |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    named = []
    for call in calls:
        name = next(name for name in _proposals(call, is_last) if name not in taken)
        named.append((call, name))
        taken.add(name)
    return named


def _proposals(call: ast.Call, is_last: bool) -> Iterator[str]:
    called = ast.unparse(call.func)
    if called in LAYERS.values() and isinstance(layer := call.args[0], ast.Attribute):
        short = layer.attr.removesuffix("_proj")
        is_name = len(short) > 1 and not keyword.iskeyword(short)
        if called == LAYERS["rowwise"] and is_last:
            yield "output"
        yield short if is_name else f"{short}_states"
        yield f"{short}_output"
    yield "total" if called == f"{OPS}all_reduce" else "result"
    yield from (f"result_{number}" for number in count(1))


def _moved(text: str, statement: ast.stmt, named: list[tuple[ast.Call, str]]) -> str:
    """Return the text with lines that name what calls give before the statement they are in."""
    spans = Spans(text)
    start, indent = spans.line(statement.lineno), " " * statement.col_offset
    lines = [f"{indent}{name} = {spans.code(call)}\n" for call, name in named]
    spans.replace(start, start, "".join(lines))
    for call, name in named:
        spans.replace(spans.start(call), spans.end(call), name)
    return format_python(spans.done(), closing=True)
