"""What a call gives: the shape of its result, with holes for the parts that exist at run time."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onboard.codegen.translate.language.values import Code, Items, Value


@dataclass(frozen=True, eq=False)
class Hole(Value):
    """The i-th run-time part of a call's result."""

    index: int
    form: str | None = None
    optional: bool = False
    like: Code | None = None
    """What the part is where its code does not say it."""

    @property
    def may_be_none(self) -> bool:
        """Whether it may be None."""
        return self.optional

    def same_as(self, other: Hole) -> bool:
        """Whether both are the same part."""
        return self.index == other.index and type(self.like) is type(other.like)

    def filled(self, parts: Sequence[Code]) -> Code:
        """Return the part."""
        if self.like is not None:
            return self.like.of_result(parts, self.index)
        return replace(parts[self.index], form=self.form, optional=self.optional)


def fill(shape: Value, parts: Sequence[Code]) -> Value:
    """Return the shape of a result with its holes replaced by `parts`."""
    return (
        shape.filled(parts)
        if isinstance(shape, Hole)
        else shape.mapped(lambda item: fill(item, parts))
    )


@dataclass(frozen=True, eq=False)
class Result(Value):
    """A call whose result has several run-time parts; `shape` is a value with `Hole`s in it."""

    expr: ast.expr
    shape: Value
    holes: int
    transposed: bool = False

    @property
    def is_plain_tuple(self) -> bool:
        """Whether it is a tuple of its run-time parts and nothing else."""
        shape = self.shape
        return (
            not self.transposed
            and type(shape) is Items
            and all(isinstance(item, Hole) for item in shape.items)
        )

    def code(self) -> ast.expr:
        """Return the call."""
        return super().code() if self.transposed else self.expr

    def truth(self) -> bool | None:
        """Return that it is not known."""
        return None
