"""How phases have something done with a model's own code: in a child process, with a bound on
everything.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from onboard.errors import ConsentRequiredError, OnboardError, UntranslatableError
from onboard.workflow.phase import RunContext
from onboard.workflow.remote.agreed import file_of
from onboard.workflow.remote.code_session import OPEN_SESSIONS, Session, agree
from onboard.workflow.remote.handed import small_files
from onboard.workflow.remote.messages import REPLIES
from onboard.workflow.remote.ported import with_ported
from onboard.workflow.remote.replies import Reply
from onboard.workflow.remote.sandbox import missing


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
    return _result(_session(context).ask(task, arguments, REPLIES[task], own_code=own_code))


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
        reply = session.ask(
            "port", arguments, REPLIES["port"], own_code=spec.repository is not None
        )
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


def _session(context: RunContext) -> Session:
    """Return the session of a model's run; there is never more than one."""
    folder = context.source.files()
    key = f"{context.work_dir} {folder}"
    for other in [
        session
        for session in OPEN_SESSIONS.values()
        if session.key != key or session.process.poll() is not None
    ]:
        other.close()
    if key not in OPEN_SESSIONS:
        code = small_files(folder)
        OPEN_SESSIONS[key] = Session(key)
        agree(OPEN_SESSIONS[key], unsandboxed=context.options.unsandboxed)
        OPEN_SESSIONS[key].give(context.source.config(), code, tests=True)
    return OPEN_SESSIONS[key]


def walls(context: RunContext) -> dict[str, list[str]]:
    """Return which walls hold around the code of a run's model, and which are missing."""
    held = _session(context).hello.walls
    return {"hold": held, "missing": missing(held)}


def close_sessions() -> None:
    """End the child process of the last run, if there is one."""
    for session in list(OPEN_SESSIONS.values()):
        session.close()


atexit.register(close_sessions)
