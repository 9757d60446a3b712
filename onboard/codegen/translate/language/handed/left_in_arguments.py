"""What a function puts into something that it is given, until somebody reads it there."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.language.values import Value

Path = tuple[str, ...]
"""A parameter, and the names of the parts that lead from it to one."""


@dataclass(frozen=True, eq=False)
class Left(Value):
    """What a call has put into a part of an argument: who reads it has the function return it, and
    everything translated anew.
    """

    function: object
    path: Path
    want: Callable[[object, Path], None]
    """Notes that it is read, and raises `Restart`."""

    def read(self) -> None:
        """Have it returned.

        Raises:
            Restart: always, but for what is returned already.
        """
        self.want(self.function, self.path)
        raise Untranslatable(
            f"{'.'.join(self.path)}, which a function leaves there and reads again"
        )

    def code(self) -> ast.expr:
        """Have it returned."""
        self.read()
        return super().code()

    def truth(self) -> bool | None:
        """Have it returned."""
        self.read()
        return None

    def same_as(self, other: Left) -> bool:
        """Whether both come from the same function."""
        return self.function == other.function and self.path == other.path

    def fact(self) -> Value:
        """Return itself: a function that reads it asks for it, too."""
        return self

    def joined(self, other: Value) -> Value:
        """Return itself: whether it is returned decides what is known of both."""
        return self
