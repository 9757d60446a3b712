"""Rotary tables that depend on how long the sequence is, and what that means for batching.

Hugging Face picks such a table once per forward pass, by the largest position in it: `longrope` (Ding et al. 2024)
has a short and a long table, `dynamic` NTK scaling a table for each length past the original one. A step that is to
agree with it must hold sequences of one table only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LengthDependentRope:
    """Which table a sequence is computed with."""

    switch_length: int
    """Longest sequence that uses the original table."""
    dynamic: bool = False
    """Past the switch there is a table for every length, not one for all; cached keys then keep the table they had.

    With one table the cache is computed anew when the sequence crosses the switch, as Hugging Face does.
    """

    def table(self, length: int) -> int:
        """Return the shortest length that has the same table as `length`; 0 for the original table."""
        if length <= self.switch_length:
            return 0
        return length if self.dynamic else self.switch_length + 1


def length_dependent_rope(config: Mapping[str, Any]) -> LengthDependentRope | None:
    """Read from a Hugging Face config (as a dict) whether its rotary table depends on the length."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for each in (parameters, *(value for value in parameters.values() if isinstance(value, Mapping))):
        kind = each.get("rope_type", each.get("type"))
        if kind in ("longrope", "dynamic"):
            original = each.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
            return LengthDependentRope(int(original or config["max_position_embeddings"]), kind == "dynamic")
    return None
