"""Requests of a file answered into another one, with progress."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onboard.cli.extras import import_extra
from onboard.cli.terminal import progress

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
    libraries = import_extra("onboard.serve.batch.batch_run", "serve", "--input needs")
    defaults = {name: value for name, value in chosen.items() if value not in (None, [])}
    job = libraries.BatchJob(requests, answers, defaults, system)
    with progress("answering", len(job.ids())) as advance:
        count = libraries.answer_file(llm, model, job, advance)
    before = f" ({count.before} before)" if count.before else ""
    said = f"{count.requests} requests, {count.done} done{before}, {count.refused} refused"
    print(said, file=sys.stderr)
    return 1 if count.refused else 0
