"""A child process that runs a repository's code, seen from the process that started it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from onboard.errors import ConsentRequiredError, OnboardError
from onboard.workflow.remote.channel import Channel
from onboard.workflow.remote.replies import Hello, Message, Reply
from onboard.workflow.remote.sandbox import WALLS, Limits, environment, missing

LIMITS = Limits()
M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Reply[Any])


class Session:
    """A child process that serves one model's run, and the folder that is its home."""

    def __init__(self, key: str, limits: Limits | None = None, files: Sequence[int] = ()) -> None:
        self.key, self.limits = key, limits or LIMITS
        self.folder = Path(tempfile.mkdtemp(prefix="onboard-")).resolve()
        self._replies, self._write_replies = os.pipe()
        self.process = self._start(files)
        self.channel = Channel(self.process, self._replies)
        self.hello = self._exchange({}, Hello)

    def _start(self, files: Sequence[int]) -> subprocess.Popen[bytes]:
        """Start the process; it has these open files beside its pipes, under the same numbers."""
        module = "onboard.workflow.remote.child"
        words = [str(os.getpid()), str(self._write_replies), self.limits.model_dump_json()]
        process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            cwd=self.folder,
            env=environment(self.folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[self._write_replies, *files],
            start_new_session=True,
        )
        os.close(self._write_replies)
        return process

    def give(
        self, config: Mapping[str, Any], code: Mapping[str, str], *, tests: bool = False
    ) -> None:
        """Hand over the parsed config.json and the texts of the code; `tests` are among the tasks
        to come.
        """
        self._exchange({"config": config, "code": code, "tests": tests}, Reply[None])

    def ask(self, task: str, arguments: Mapping[str, Any], schema: type[R], *, own_code: bool) -> R:
        """Have one task done, on the model's `own_code` or without it; a process that does not
        answer in time, ends, or breaks the schema, is closed.
        """
        request = {"task": task, "arguments": arguments, "own_code": own_code}
        return self._exchange(request, schema)

    def _exchange(self, message: Mapping[str, Any], schema: type[M]) -> M:
        try:
            sent = json.dumps(message).encode()
            return schema.model_validate_json(self.channel.exchange(sent, self.limits.seconds))
        except ValidationError as error:
            self.close()
            raise _not_as_agreed(error) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process and all that it started, and remove its folder."""
        OPEN_SESSIONS.pop(self.key, None)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.channel.close()
        # tempfile's own removal follows links in some versions of Python, to change modes
        shutil.rmtree(self.folder, ignore_errors=True)


def _not_as_agreed(error: ValidationError) -> OnboardError:
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"]))[:60]
    return OnboardError(
        f"the process that ran the model's code sent what is no reply ({place}: {first['msg'][:200]})",
        hint="Do not trust this model",
    )


OPEN_SESSIONS: dict[str, Session] = {}
"""Those that wait for their model's next task, by their keys."""


def agree(session: Session, *, unsandboxed: bool) -> None:
    """Raise `ConsentRequiredError` where a wall is missing, and nobody agreed to go on without."""
    lacking = missing(session.hello.walls)
    if lacking and not unsandboxed:
        session.close()
        what = "; ".join(f"{name}: {WALLS[name]}" for name in lacking)
        raise ConsentRequiredError(
            f"this system cannot keep the model's code from what is yours ({what})",
            hint="Run it on another (docs/remote_code.md says which), or with --unsandboxed as it is",
        )
