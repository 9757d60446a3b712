"""Where a run of one model takes place: of several GPUs on one that nobody uses, and on another one
where that had no room after all.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from onboard.gpu import list_gpus
from onboard.workflow.phase import RunContext
from onboard.workflow.processes.watched import Tell
from onboard.workflow.registry_runs.places import GpuPlaces

_WANT_OF_ROOM = re.compile(r"out of memory|memory ran out|CUDA error", re.IGNORECASE)


@contextmanager
def own_gpu(
    context: RunContext, waits: Tell, ranks: int = 1
) -> Iterator[tuple[dict[str, str], str]]:
    """Yield what a run's environment gets, and a fact where it shares a GPU.

    A free GPU is waited for as long as the runner's settings say; `waits` hears why. Where there is one
    GPU or none, or the run is on the CPU, there is nothing to choose; a run of several ranks sees
    all.
    """
    if ranks > 1 or not _can_choose(context):
        yield {}, ""
        return
    late, seconds = threading.Event(), context.options.agents.runner.seconds
    timer = threading.Timer(seconds, late.set)
    timer.start()
    try:
        place = GpuPlaces().take(waits, late)
    finally:
        timer.cancel()
    if place is None:
        yield {}, f"no GPU was free within {seconds:g} s: the run shares one"
        return
    try:
        yield place.environment, ""
    finally:
        place.leave()


def worth_another(context: RunContext, result: dict[str, Any]) -> str:
    """Return why a run that failed may succeed elsewhere: it had no room on one of several GPUs;
    "" where it may not.
    """
    wanted = _WANT_OF_ROOM.search(result.get("error") or "")
    failed = result["status"] == "runtime_error"
    return result["error"] if failed and wanted and _can_choose(context) else ""


def _can_choose(context: RunContext) -> bool:
    return context.options.device != "cpu" and len(list_gpus()) > 1
