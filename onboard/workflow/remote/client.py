"""How phases have something done with a model's own code: in a child process, with a bound on
everything.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from onboard.errors import ConsentRequiredError, OnboardError, UntranslatableError
from onboard.workflow.phase import RunContext
from onboard.workflow.remote.agreed import file_of
from onboard.workflow.remote.channel import Channel
from onboard.workflow.remote.handed import small_files
from onboard.workflow.remote.messages import REPLIES, Hello, Message, Reply
from onboard.workflow.remote.ported import with_ported
from onboard.workflow.remote.sandbox import WALLS, Limits, environment, missing

LIMITS = Limits()
M = TypeVar("M", bound=Message)


def call(context: RunContext, task: str, **arguments: Any) -> Any:
    """Return the result of a task of `onboard.workflow.remote.tasks` on the model of a run, whose
    own code is imported for it.

    Raises:
        OnboardError: the task says what is wrong, or its process was stopped.
    """
    if not context.options.trust_remote_code:
        raise ConsentRequiredError(
            "this runs code from the model's repository", hint="Pass --trust-remote-code"
        )
    return _asked(context, task, arguments, own_code=True)


def in_walls(context: RunContext, task: str, **arguments: Any) -> Any:
    """Return the result of a task on what somebody proposes for a model; see `call`.

    Code of the model's own is imported where its spec is made from that, and nowhere else.
    """
    if context.spec.repository is not None:
        return call(context, task, **arguments)
    return _asked(context, task, arguments, own_code=False)


def _asked(context: RunContext, task: str, arguments: Mapping[str, Any], *, own_code: bool) -> Any:
    return _result(_session(context).ask(task, arguments, own_code=own_code))


def ported(context: RunContext, name: str, block: str) -> str:
    """Return the model file that the generator makes of modeling code of which a class has another
    text: in a process of its own, whose copy of the code has it.

    Raises:
        OnboardError: the code does not run, or has no translation with it either.
    """
    spec = context.spec
    code = {}
    if spec.repository is not None:
        code, file = small_files(context.source.files()), file_of(spec.hf_module)
        code[file] = with_ported(code[file], name, block)
    session = Session(f"{context.work_dir} ported")
    try:
        agree(session, unsandboxed=context.options.unsandboxed)
        session.give(context.source.config(), code)
        arguments = {"spec": spec.to_yaml(), "name": name, "block": block}
        reply = session.ask("port", arguments, own_code=spec.repository is not None)
    finally:
        session.close()
    return str(_result(reply))


def _result(reply: Reply[Any]) -> Any:
    if reply.error is not None:
        if reply.block:
            raise UntranslatableError(reply.error, hint=reply.hint, block=reply.block)
        raise OnboardError(reply.error, hint=reply.hint)
    return reply.result


def run_pytest(
    context: RunContext,
    files: Mapping[str, str],
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    *,
    ask: Callable[..., Any] = call,
) -> str:
    """Run pytest as `onboard.workflow.processes.pytest_run` does, on a root of these files alone;
    what its plugin writes is written from here. `ask` is `call`, or `in_walls`.
    """
    results = arguments[list(arguments).index("--onboard-results") + 1]
    run = partial(ask, context, "run_pytest", files=dict(files), environment=dict(environment))
    tested = run(arguments=list(arguments), results=results)
    if tested.rows:
        rows = [row.model_dump() for row in tested.rows]
        Path(results).write_text(json.dumps(rows), encoding="utf-8")
    return str(tested.output)


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

    def give(self, config: Mapping[str, Any], code: Mapping[str, str]) -> None:
        """Hand over the parsed config.json and the texts of the code."""
        self._exchange({"config": config, "code": code}, Reply[None])

    def ask(self, task: str, arguments: Mapping[str, Any], *, own_code: bool) -> Reply[Any]:
        """Have one task done, on the model's `own_code` or without it; a process that does not
        answer in time, ends, or breaks the schema, is closed.
        """
        request = {"task": task, "arguments": arguments, "own_code": own_code}
        return self._exchange(request, REPLIES[task])

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
        _SESSIONS.pop(self.key, None)
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


_SESSIONS: dict[str, Session] = {}


def _session(context: RunContext) -> Session:
    """Return the session of a model's run; there is never more than one."""
    folder = context.source.files()
    key = f"{context.work_dir} {folder}"
    for other in [
        session
        for session in _SESSIONS.values()
        if session.key != key or session.process.poll() is not None
    ]:
        other.close()
    if key not in _SESSIONS:
        code = small_files(folder)
        _SESSIONS[key] = Session(key)
        agree(_SESSIONS[key], unsandboxed=context.options.unsandboxed)
        _SESSIONS[key].give(context.source.config(), code)
    return _SESSIONS[key]


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


def walls(context: RunContext) -> dict[str, list[str]]:
    """Return which walls hold around the code of a run's model, and which are missing."""
    held = _session(context).hello.walls
    return {"hold": held, "missing": missing(held)}


def close_sessions() -> None:
    """End the child process of the last run, if there is one."""
    for session in list(_SESSIONS.values()):
        session.close()


atexit.register(close_sessions)
