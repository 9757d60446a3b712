"""The variables of a function."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace

from onboard.codegen.translate.language.trees.syntax import name
from onboard.codegen.translate.language.values import Code, Items, Known, Mapping, Value


@dataclass
class Env:
    """Variables of a function; attributes of the module under construction are called `self.x`."""

    values: dict[str, Value] = field(default_factory=dict)

    def copy(self) -> Env:
        """Return an independent copy."""
        return Env({key: _own_copy(value) for key, value in self.values.items()})

    def tuples_with(self, value: Value, variable: str) -> dict[str, Value]:
        """Return the tuples with a called part, which now gets a name, as of that name: nothing is
        called twice, and who reads the tuple later finds as many parts.
        """
        if type(value) is not Code or not isinstance(value.expr, ast.Call):
            return {}
        if value.transposed or value.masked:
            return {}
        named = replace(value, expr=name(variable))
        tuples = {
            key: each.mapped(lambda part: named if part is value else part)
            for key, each in self.values.items()
            if isinstance(each, Items) and key != variable and any(p is value for p in each.items)
        }
        return {
            key: each
            for key, each in tuples.items()
            if all(part is named or not part.mentions(variable) for part in each.parts())
        }


@dataclass
class Turn:
    """A turn of a loop: the variables before the loop, None where it is run turn by turn, and those
    where the turn ends, with which of them have changed.
    """

    node: ast.For | ast.While
    start: Env | None
    branches: int
    ends: list[tuple[list[str], Env]] = field(default_factory=list)


def _own_copy(value: Value) -> Value:
    return Mapping(dict(value.items)) if isinstance(value, Mapping) else value


def is_computed(value: Value, variable: str) -> bool:
    """Whether a value is a tuple with parts computed from `variable`, as shapes are, and so best
    kept whole.
    """
    if not isinstance(value, Items):
        return False
    plain = all(
        isinstance(item, Known) or (type(item) is Code and not item.transposed)
        for item in value.items
    )
    bare = any(
        isinstance(item, Code) and ast.unparse(item.expr) == variable for item in value.items
    )
    return plain and not bare
