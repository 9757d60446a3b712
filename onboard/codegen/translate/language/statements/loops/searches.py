"""Loops of constructors that look for something, `for ...: if ...: self.found = ...; break`: what
they find no code that is generated may read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.values import Unread


def looked_for(node: ast.For | ast.While, frame: Frame) -> bool:
    """Leave what a loop with a `break` assigns unread, if that is all it does; return whether it
    is.
    """
    breaks = any(isinstance(item, ast.Break) for item in ast.walk(node))
    if not (breaks and frame.kind == "init" and frame.translator.specialised):
        return False
    found = list(_found(node.body + node.orelse))
    if None in found:
        return False
    for key in found:
        reason = f"{key}, which a loop at {frame.source.location(node)} looks for"
        frame.env.values[str(key)] = Unread(reason)
    return True


def _found(statements: Sequence[ast.stmt]) -> Iterator[str | None]:
    """Yield the variables and attributes that statements assign; None for one that does more."""
    for statement in statements:
        match statement:
            case ast.Assign(targets=targets, value=value) if not _calls_more(value):
                yield from (_place(target) for target in targets)
            case ast.If(test=test, body=body, orelse=other) if not _calls_more(test):
                yield from _found(body + other)
            case ast.Break() | ast.Continue() | ast.Pass():
                continue
            case _:
                yield None


def _place(target: ast.expr) -> str | None:
    match target:
        case ast.Name(id=key):
            return key
        case ast.Attribute(value=ast.Name(id="self"), attr=attr):
            return f"self.{attr}"
    return None


def _calls_more(value: ast.expr) -> bool:
    """Whether an expression calls a function that may do more than look."""
    looks = ("hasattr", "getattr", "isinstance", "len", "type", "int", "str", "bool")
    calls = (item for item in ast.walk(value) if isinstance(item, ast.Call))
    return any(not (isinstance(item.func, ast.Name) and item.func.id in looks) for item in calls)
