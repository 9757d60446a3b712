"""Lowers a plan's default limits to what fits in memory, as a run does, without torch."""

from __future__ import annotations

from dataclasses import replace

from onboard.cache.budget import MemoryPlan, lowered, starting_share
from onboard.gpu import gib


def fitted(plan: MemoryPlan) -> tuple[MemoryPlan, list[str]]:
    """Return the plan with its default limits lowered to what fits, and a fact for each."""
    if not {"max_batch_size", "max_seq_len"} & {*plan.chosen}:
        return plan, []
    limits, facts = plan.limits, list[str]()
    plan = replace(
        plan,
        wanted=(
            1 if "max_batch_size" in plan.chosen else limits.max_batch_size,
            limits.max_seq_len,
        ),
    )
    share, why = starting_share(plan.fraction)
    batch = plan.cache.fitting_batch(share * (plan.left + plan.activations))
    if "max_batch_size" in plan.chosen and batch < limits.max_batch_size:
        facts.append(lowered("max_batch_size", limits.max_batch_size, batch, why))
        serving = plan.for_limits(batch=batch, context=limits.max_seq_len)
        plan = serving.with_limits(replace(serving.limits, max_tokens=limits.max_tokens))
    longest = plan.cache.longest(plan.pages)
    if "max_seq_len" in plan.chosen and 0 < longest < limits.max_seq_len:
        facts.append(
            lowered(
                "max_seq_len",
                limits.max_seq_len,
                longest,
                f"what a cache of {gib(plan.caches)} holds",
            )
        )
        plan = plan.with_limits(replace(plan.limits, max_seq_len=longest))
    return plan, facts
