"""Requests of a file answered into another one, with progress."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onboard.cli.terminal import progress
from onboard.errors import UsageError

if TYPE_CHECKING:
    from onboard.runtime.llm import LLM


def answer_batch(
    model: str,
    llm: LLM,
    requests: Path,
    answers: Path,
    chosen: Mapping[str, Any],
    system: str | None,
) -> int:
    """Answer the requests that have no answer yet; return the exit code: 1 if some were refused.

    `chosen` are the sampling parameters of requests that say nothing themselves.
    """
    libraries = _libraries()
    defaults = {name: value for name, value in chosen.items() if value not in (None, [])}
    job = libraries.BatchJob(requests, answers, defaults, system)
    with progress("answering", len(job.ids())) as advance:
        count = libraries.answer_file(llm, model, job, advance)
    before = f" ({count.before} before)" if count.before else ""
    said = f"{count.requests} requests, {count.done} done{before}, {count.refused} refused"
    print(said, file=sys.stderr)
    return 1 if count.refused else 0


def _libraries() -> Any:
    """Import what answers; raise `UsageError` where its libraries are not installed."""
    try:
        from onboard.serve.batch import batch_run
    except ImportError as error:
        raise UsageError(
            f"--input needs {error.name}, which is not installed",
            hint="Run: pip install 'onboard[serve]'",
        ) from None
    return batch_run
