"""How phases have something done with a model's own code: in a child process, with a bound on
everything.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onboard.errors import ConsentRequiredError, OnboardError
from onboard.workflow.phase import RunContext
from onboard.workflow.remote.sandbox import Limits, environment

LIMITS = Limits()
_POLL = 0.02
_MOST_REPLY = 64 * 2**20


def call(context: RunContext, task: str, **arguments: Any) -> Any:
    """Return the result of a task of `onboard.workflow.remote.tasks` on the model of a run.

    Raises:
        OnboardError: the task says what is wrong, or its process was stopped.
    """
    if not context.options.trust_remote_code:
        raise ConsentRequiredError(
            "this runs code from the model's repository", hint="Pass --trust-remote-code"
        )
    request = {
        "task": task,
        "code": str(context.source.files()),
        "config": context.source.config(),
        "arguments": arguments,
    }
    reply = _session(f"{context.work_dir} {context.source.files()}").ask(request)
    if "error" in reply:
        raise OnboardError(str(reply["error"]), hint=str(reply.get("hint", "")))
    return reply["result"]


def run_pytest(
    context: RunContext, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> str:
    """Run pytest as `onboard.workflow.processes.pytest_run` does; what its plugin writes is written
    from here.
    """
    results = arguments[list(arguments).index("--onboard-results") + 1]
    os.environ.update(environment)
    reply = call(
        context, "run_pytest", arguments=list(arguments), working=str(folder), results=results
    )
    if reply["results"]:
        Path(results).write_text(str(reply["results"]), encoding="utf-8")
    return str(reply["output"])


class Session:
    """A child process and the temporary folder that it may write to; it serves one model's run."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.temporary = tempfile.TemporaryDirectory(prefix="onboard-", ignore_cleanup_errors=True)
        self.folder = Path(self.temporary.name).resolve()
        self.asked = 0
        command = [
            sys.executable,
            "-m",
            "onboard.workflow.remote.child",
            str(self.folder),
            LIMITS.model_dump_json(),
        ]
        with (self.folder / "output.txt").open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment(self.folder),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have one task done; a process that does not answer in time, or ends, is closed."""
        self.asked += 1
        path = self.folder / f"{self.asked}.request"
        path.write_text(json.dumps(request), encoding="utf-8")
        assert self.process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                print(self.asked, file=self.process.stdin, flush=True)
            return self._answer(path.with_suffix(".reply"))
        except BaseException:
            self.close()
            raise

    def _answer(self, path: Path) -> dict[str, Any]:
        deadline = time.monotonic() + LIMITS.seconds
        while not path.exists() and self.process.poll() is None:
            if time.monotonic() > deadline:
                raise OnboardError(
                    f"the model's code was stopped after {LIMITS.seconds:g} s",
                    hint="Read what it does when it is imported",
                )
            time.sleep(_POLL)
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _MOST_REPLY:
            last = " ".join(
                (self.folder / "output.txt").read_bytes()[-2000:].decode(errors="replace").split()
            )[-200:]
            code = self.process.poll()
            raise OnboardError(
                f"the process that ran the model's code ended ({code}) without a result ({last})"
            )
        reply = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(reply, dict) or not reply.keys() & {"error", "result"}:
            raise OnboardError("the process that ran the model's code gave no result")
        return reply

    def close(self) -> None:
        """End the process and all that it started, and remove its folder."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self.temporary.cleanup()
        _SESSIONS.pop(self.key, None)


_SESSIONS: dict[str, Session] = {}


def _session(key: str) -> Session:
    """Return the session of a model's run; there is never more than one."""
    for other in [
        session
        for session in _SESSIONS.values()
        if session.key != key or session.process.poll() is not None
    ]:
        other.close()
    if key not in _SESSIONS:
        _SESSIONS[key] = Session(key)
    return _SESSIONS[key]


def close_sessions() -> None:
    """End the child process of the last run, if there is one."""
    for session in list(_SESSIONS.values()):
        session.close()


atexit.register(close_sessions)
