"""A generated model file that calls canonical ops as functions, or has others do their work."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from onboard.errors import OnboardError
from onboard.ops.library import NAMESPACE, op_sources
from onboard.standalone.statements import Edit, Module, edited, is_own


@dataclass(frozen=True)
class OpCall:
    """A call of a canonical op."""

    name: str
    function: ast.Attribute
    """What is called, `torch.ops.onboard.<name>`."""
    method: ast.FunctionDef | None
    """The method of a class that it stands in."""
    owner: ast.ClassDef | None


def op_calls(module: Module) -> list[OpCall]:
    """Return the calls of canonical ops in a model file."""
    found = []
    for statement in module.statements:
        owner = statement.node if isinstance(statement.node, ast.ClassDef) else None
        methods = (
            [each for each in owner.body if isinstance(each, ast.FunctionDef)] if owner else []
        )
        for function in _ops_in(statement.node):
            method = next(
                (each for each in methods if any(node is function for node in ast.walk(each))), None
            )
            found.append(OpCall(function.attr, function, method, owner))
    return found


def with_functions(text: str) -> str:
    """Return a model file that imports the ops that it calls, and calls them as plain functions.

    Raises:
        OnboardError: an op is not this package's own.
    """
    module = Module("onboard.model", text)
    calls = op_calls(module)
    imports = "".join(
        f"from {_module_of(name)} import {name}\n" for name in sorted({call.name for call in calls})
    )
    edits: list[Edit] = [(*module.span(call.function), call.name) for call in calls]
    edits += [(*module.line_span(each), imports) for each in _registering_imports(module)]
    return edited(text, edits)


def insert_after(module: Module, node: ast.stmt, line: str) -> Edit:
    """Return the edit that puts a line behind a statement, indented as that is."""
    _, end = module.span(node)
    return end, end, f"\n{' ' * node.col_offset}{line}"


def _registering_imports(module: Module) -> list[ast.Import]:
    imports = [each.node for each in module.statements if isinstance(each.node, ast.Import)]
    return [each for each in imports if any(is_own(alias.name) for alias in each.names)]


def _module_of(op: str) -> str:
    source = op_sources().get(op)
    if source is None or not source.ships:
        raise OnboardError(
            f"the model calls {op}, an op of an extension",
            hint="Only ops that come with onboard go along",
        )
    return source.module


def _ops_in(node: ast.AST) -> Iterator[ast.Attribute]:
    prefix = f"torch.ops.{NAMESPACE}"
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and ast.unparse(part.value) == prefix:
            yield part
