"""Branches that texts beyond a length of the config take: refused where they have no translation."""

from __future__ import annotations

import ast
from typing import Any

from onboard.codegen.translate.language.env import Env
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.trees.syntax import TOO_LONG, Untranslatable
from onboard.codegen.translate.language.values import Code, Value

Side = tuple[list[ast.stmt], Env, str]


def short_texts(node: ast.If, test: Value, sides: list[Any], frame: Frame) -> Side | None:
    """Return the other side of a condition that holds of texts beyond a length of the config only;
    assert it.
    """
    match test.code() if isinstance(test, Code) and isinstance(sides[0], Untranslatable) else None:
        case ast.Compare(
            left=ast.Attribute() as limit,
            ops=[ast.Lt()],
            comparators=[ast.Subscript(value=ast.Attribute(attr="shape")) as size],
        ) if not isinstance(sides[1], Untranslatable) and ast.unparse(limit).startswith(
            "self.config."
        ):
            said = ast.Constant(f"{TOO_LONG} at a time")
            frame.emit(ast.Assert(ast.Compare(size, [ast.LtE()], [limit]), said), node)
            side: Side = sides[1]
            return side
    return None
