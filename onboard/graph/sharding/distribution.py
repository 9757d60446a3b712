"""How the ranks divide the work among them: tensor parallel, and within mixtures by experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onboard.config import DistMapping, RuntimeConfig
from onboard.errors import UsageError
from onboard.graph.sharding.cuts import Cut, nearly_evenly


@dataclass(frozen=True)
class Distribution:
    """The groups of a run."""

    world_size: int
    stages: int = 1
    """Pipeline stages; the layers of several are whole."""
    moe_tp: int | None = None
    """None: it is chosen for each mixture, all by experts where their number allows it."""

    def experts(self, number: int) -> int:
        """Return how many groups divide a mixture's experts."""
        if self.moe_tp is not None:
            return self.world_size // self.moe_tp
        return self.world_size if number % self.world_size == 0 else 1

    def of_experts(self, number: int, groups: int) -> Cut:
        """Return which experts each rank has."""
        return self._by(
            nearly_evenly(number, groups), lambda rank: rank * groups // self.world_size
        )

    def of_channels(self, size: int, groups: int) -> Cut | None:
        """Return which channels of its experts each rank has; None where they do not divide."""
        ranks = self.world_size // groups
        return (
            None
            if size % ranks
            else self._by(nearly_evenly(size, ranks), lambda rank: rank % ranks)
        )

    def _by(self, cut: Cut, place: Any) -> Cut:
        return Cut(cut.size, tuple(cut.entries[place(rank)] for rank in range(self.world_size)))


def distribution(world_size: int, mapping: DistMapping) -> Distribution:
    """Return the groups that a mapping names.

    Raises:
        UsageError: they do not make up the world, or are not there yet.
    """
    if mapping.pp != 1:
        return _in_stages(world_size, mapping)
    if mapping.tp not in (None, world_size):
        raise UsageError(
            f"dist_mapping has tp {mapping.tp} for {world_size} ranks",
            hint=f"Set it to {world_size}",
        )
    if mapping.moe_tp is None and mapping.moe_ep is None:
        return Distribution(world_size)
    moe_ep = mapping.moe_ep or world_size // (mapping.moe_tp or 1)
    moe_tp = mapping.moe_tp or max(1, world_size // moe_ep)
    if moe_tp * moe_ep != world_size:
        raise UsageError(
            f"dist_mapping has moe_tp {moe_tp} and moe_ep {moe_ep} for {world_size} ranks",
            hint="Their product is the number of ranks",
        )
    return Distribution(world_size, moe_tp=moe_tp)


def _in_stages(world_size: int, mapping: DistMapping) -> Distribution:
    """Return one rank a stage."""
    if mapping.pp != world_size:
        raise UsageError(
            f"dist_mapping has pp {mapping.pp} for {world_size} ranks, and a stage has one rank",
            hint=f"Set it to {world_size}, or to 1",
        )
    if {mapping.tp, mapping.moe_tp, mapping.moe_ep} - {None, 1}:
        raise UsageError(
            f"dist_mapping has pp {mapping.pp}, and the layers of a stage are not divided",
            hint="Leave tp, moe_tp and moe_ep out",
        )
    return Distribution(world_size, stages=world_size)


def check_stages(runtime: RuntimeConfig) -> None:
    """Raise `UsageError` for what pipeline stages do not do."""
    if runtime.mode != "graph":
        raise UsageError("pipeline stages need mode graph", hint="Leave dist_mapping.pp out")
    if runtime.lora:
        raise UsageError("pipeline stages have no adapters", hint="Leave dist_mapping.pp out")
    if runtime.speculative.draft:
        raise UsageError("drafts are for one device", hint="Leave dist_mapping.pp out")
