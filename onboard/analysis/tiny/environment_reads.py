"""Environment variables that a repository's code reads: it runs with none of the user's."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_READING = ("os.getenv", "os.environ.get", "getenv", "environ.get")
_TABLES = ("os.environ", "environ")


def environment_reads(text: str) -> dict[int, str]:
    """Return the environment variables that Python code reads, by their lines."""
    return {line: name for node in ast.walk(ast.parse(text)) for line, name in _read_by(node)}


def _read_by(node: ast.AST) -> Iterator[tuple[int, str]]:
    match node:
        case ast.Call(func=function, args=[ast.Constant(value=str() as name), *_]):
            if ast.unparse(function) in _READING:
                yield node.lineno, name
        case ast.Subscript(value=table, slice=ast.Constant(value=str() as name), ctx=ast.Load()):
            if ast.unparse(table) in _TABLES:
                yield node.lineno, name
