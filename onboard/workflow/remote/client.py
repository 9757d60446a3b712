"""How phases have something done with a model's own code: in a child process, with a bound on everything."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onboard.errors import ConsentRequiredError, OnboardError
from onboard.workflow.phase import RunContext
from onboard.workflow.remote.child import REPLY, REQUEST
from onboard.workflow.remote.sandbox import Limits, environment

LIMITS = Limits()
_GRACE = 5.0
_MOST_REPLY = 64 * 2**20


def call(context: RunContext, task: str, **arguments: Any) -> Any:
    """Return the result of a task of `onboard.workflow.remote.tasks` on the model of a run.

    Raises:
        OnboardError: the task says what is wrong, or its process was stopped.
    """
    if not context.options.trust_remote_code:
        raise ConsentRequiredError("this runs code from the model's repository", hint="Pass --trust-remote-code")
    with tempfile.TemporaryDirectory(prefix="onboard-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        request = {
            "task": task,
            "code": str(context.source.files()),
            "config": context.source.config(),
            "limits": LIMITS.model_dump(),
            "arguments": arguments,
        }
        (folder / REQUEST).write_text(json.dumps(request), encoding="utf-8")
        reply = _read(folder / REPLY, *_run(folder))
    if "error" in reply:
        raise OnboardError(str(reply["error"]), hint=str(reply.get("hint", "")))
    return reply["result"]


def run_pytest(context: RunContext, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    """Run pytest as `onboard.workflow.pytest_run` does; what its plugin writes is written from here."""
    results = arguments[list(arguments).index("--onboard-results") + 1]
    os.environ.update(environment)
    reply = call(context, "run_pytest", arguments=list(arguments), working=str(folder), results=results)
    if reply["results"]:
        Path(results).write_text(str(reply["results"]), encoding="utf-8")
    return str(reply["output"])


def _run(folder: Path) -> tuple[int | None, str]:
    """Run the child; return its exit code (None: it took too long) and the end of what it printed."""
    command = [sys.executable, "-m", "onboard.workflow.remote.child", str(folder)]
    with (folder / "output.txt").open("w+b") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(LIMITS.seconds + _GRACE)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(max(0, output.tell() - 2000))
        return code, output.read().decode(errors="replace")


def _read(path: Path, code: int | None, output: str) -> dict[str, Any]:
    if code is None:
        raise OnboardError(
            f"the model's code was stopped after {LIMITS.seconds:g} s",
            hint="Read what it does before its model is made",
        )
    if path.is_symlink() or not path.is_file() or path.stat().st_size > _MOST_REPLY:
        last = " ".join(output.split())[-200:]
        raise OnboardError(f"the process that ran the model's code ended with exit code {code} and no result ({last})")
    reply = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(reply, dict) or not reply.keys() & {"error", "result"}:
        raise OnboardError("the process that ran the model's code gave no result")
    return reply
