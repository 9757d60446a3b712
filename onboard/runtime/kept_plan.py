"""The cache of memory plans: a plan made before is shown again without torch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from onboard.cache.budget import MemoryPlan
from onboard.cache.written_plan import read_plan, written_plan
from onboard.config import RuntimeConfig
from onboard.content import content_path
from onboard.hub import read_config
from onboard.runtime.kept_document import KeptDocument
from onboard.runtime.sketch.ask import sketched
from onboard.runtime.tested_file import why_untested


class KeptPlan(KeptDocument):
    """The file of one memory plan."""

    def find(self) -> tuple[MemoryPlan, list[str]] | None:
        """Return the plan and its facts; None when it was not made, or is damaged."""
        if (document := self.read()) is None:
            return None
        try:
            return read_plan(document["plan"]), list(map(str, document["facts"]))
        except (ValueError, KeyError, TypeError):  # it can be made again
            return None

    def keep(self, plan: MemoryPlan, facts: list[str]) -> None:
        """Write a plan and its facts."""
        self.write({"plan": written_plan(plan), "facts": facts})


BOUNDED = (
    "activations and CUDA graphs are upper bounds, by the model file's code;"
    " with --exact the run's own graph is made and tells them"
)


def counted_or_kept(
    checkpoint: Path,
    runtime: RuntimeConfig,
    *,
    gpu: bool,
    root: Path,
    model: str,
    decides: Callable[[MemoryPlan], bool] | None = None,
) -> tuple[MemoryPlan, list[str]]:
    """Return the plan for any memory, and its facts, from the cache if it was made before.

    If there is none, a sketch is made first: it has upper bounds of what only a graph can tell. If
    `decides` says that the bounds do not answer the question, the plan is made from the graph.
    """
    kept = KeptPlan(checkpoint, runtime, gpu=gpu, root=root)
    if (found := kept.find()) is not None:
        return found
    why = []
    if decides is not None:
        drawn = sketched(checkpoint, runtime, gpu=gpu, root=root)
        if isinstance(drawn, MemoryPlan) and decides(drawn):
            return drawn, [*_untested(checkpoint, root), BOUNDED]
        reason = drawn if isinstance(drawn, str) else "bounds leave open whether it fits"
        why = [f"the run's own graph was made for this: {reason}"]
    with _uncollected():
        from onboard.runtime.plan import count_memory

        made, facts = count_memory(checkpoint, runtime, gpu=gpu, root=root, model=model)
    kept.keep(made, facts)
    return made, [*facts, *why]


def _untested(checkpoint: Path, root: Path) -> list[str]:
    """Return the facts about a model file whose tests did not pass."""
    model_type = read_config(checkpoint)["model_type"]
    fact = why_untested(content_path("models", f"modeling_{model_type}.py", root=root), root)
    return [] if fact is None else [fact]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Switch garbage collection off meanwhile: imports and traces leave little garbage, and each
    collection takes long.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
