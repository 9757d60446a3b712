"""How modeling code writes what an op computes: as a helper function with the arguments of the
kernels that can replace it, as a module without weights, as a loop inside a method.
"""

from __future__ import annotations

import ast
import string
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CallForm:
    """How the arguments of a helper function, or of a module's forward, become those of an op."""

    expression: str
    """The op's call, in terms of the helper's parameters."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """What other parameters must be."""
    ignored: frozenset[str] = frozenset()
    """Parameters that change no value."""
    empty: frozenset[str] = frozenset()
    """Parameters that hold what earlier tokens of a text have left: tensors of zeros at its
    beginning, which is what the op has.
    """
    turned: frozenset[str] = frozenset()
    """Arguments that are [batch, channels, sequence] where the op has [batch, sequence, channels];
    so is the result.
    """
    settings: tuple[dict[str, Any], ...] = ()
    """Other values of parameters, with which the helper is tried, too."""
    with_state: bool = False
    """The helper returns (output, state)."""

    @property
    def parameters(self) -> frozenset[str]:
        """The helper's parameters that the expression reads."""
        names = {
            node.id for node in ast.walk(ast.parse(self.expression)) if isinstance(node, ast.Name)
        }
        return frozenset(names - {"torch"})


@dataclass(frozen=True)
class LoopForm:
    """A way in which modeling code writes an op as a loop, which gives like its first variable."""

    shapes: tuple[str, ...]
    """The dimensions of each variable that the loop reads, a letter each: b batch, s sequence, others
    by any name. A single letter is a vector, of any shape.
    """
    expression: str
    """The op's call, in terms of these variables, a, b, c, ...; turned to the op's order."""
    softplus: int | None = None
    """The variable of which the op takes the softplus, as loops have it already."""

    @property
    def dims(self) -> int:
        """How many dimensions the result has."""
        return len(self.shapes[0])

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of the variables in the expression."""
        return tuple(string.ascii_lowercase[: len(self.shapes)])


SCALED = "{0} * {0}.shape[-1] ** -0.5"
"""Queries that a loop multiplies by the root's inverse of their size."""


def logarithms(variable: str) -> tuple[str, str]:
    """Return expressions of a decay's logarithm: of a variable that is one, and of one that is the
    decay. One that keeps nothing has a finite logarithm.
    """
    return variable, f"torch.log({variable}.float().clamp(min=1e-37))"
