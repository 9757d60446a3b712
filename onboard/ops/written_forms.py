"""How modeling code writes what an op computes: as a helper function with the arguments of the
kernels that can replace it, as a module without weights, as a loop inside a method.
"""

from __future__ import annotations

import ast
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
    """What an op takes that is written as a loop, and gives like its first argument."""

    shapes: tuple[str, ...]
    """The dimensions of each argument, a letter each: b batch, s sequence, others by any name. A
    single letter is a vector, of any shape.
    """
    softplus: int | None = None
    """The argument of which the op takes the softplus, as loops have it already."""
    settings: tuple[float, ...] = ()
    """What the op is given behind these arguments."""

    @property
    def dims(self) -> int:
        """How many dimensions the result has."""
        return len(self.shapes[0])
