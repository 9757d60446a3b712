"""Branches that some texts take, beyond a length of the config or with tokens for images: refused where
they have no translation.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from onboard.codegen.translate.language.env import Env
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.trees.syntax import TOO_LONG, Untranslatable, with_place
from onboard.codegen.translate.language.values import Code, Value

Side = tuple[list[ast.stmt], Env, str]
_OF_VALUES = ("any", "all")


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


def of_values(node: ast.If, sides: Sequence[Any]) -> Untranslatable:
    """Return why a side of a branch has no translation, with the test that leads to it where the other
    one has, and it asks a tensor's values.
    """
    stopped, *others = (side for side in sides if isinstance(side, Untranslatable))
    asked = {item.attr for item in ast.walk(node.test) if isinstance(item, ast.Attribute)}
    if others or type(stopped) is not Untranslatable or asked.isdisjoint(_OF_VALUES):
        return stopped
    reason = f"{with_place(stopped, str(stopped))}, if {ast.unparse(node.test)}"
    told = Untranslatable(reason, stopped.blocks)
    told.block, told.place = stopped.block, stopped.place
    return told
