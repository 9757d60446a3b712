"""Rotary tables that depend on the length of the sequence, and what that means for batching.

Hugging Face picks such a table once per forward pass, by the largest position in it: `longrope`
(Ding et al. 2024, arXiv:2402.13753) has a short and a long one. To agree with it, all sequences of
a step must have the same table, and a sequence that outgrows the short table is computed again with
the long one, as Hugging Face does. `dynamic` NTK scaling needs none of this: its table changes only
past `max_position_embeddings`, which no sequence here exceeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LengthDependentRope:
    """Chooses the rotary table of a sequence by its length."""

    switch_length: int
    """Longest sequence that uses the short table."""

    def table(self, length: int) -> int:
        """Return the shortest length that has the same table as `length`, 0 for the short table."""
        return 0 if length <= self.switch_length else self.switch_length + 1


def length_dependent_rope(config: Mapping[str, Any]) -> LengthDependentRope | None:
    """Read from a Hugging Face config (as a dict) whether its rotary table depends on the
    length.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(parameters, Mapping):
        return None  # code of repositories may have a number there
    for each in (
        parameters,
        *(value for value in parameters.values() if isinstance(value, Mapping)),
    ):
        # Code of repositories has other names for the type, and the same two lists
        has_both = {"short_factor", "long_factor"} <= each.keys()
        if has_both or each.get("rope_type", each.get("type")) == "longrope":
            original = each.get("original_max_position_embeddings") or config.get(
                "original_max_position_embeddings"
            )
            return LengthDependentRope(int(original or config["max_position_embeddings"]))
    return None
