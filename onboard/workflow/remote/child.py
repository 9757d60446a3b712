"""`python -m onboard.workflow.remote.child PARENT REPLIES LIMITS`: do the tasks that come on standard
input, answer on the descriptor REPLIES.

The restrictions come first: nothing of the repository is read or imported before them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from onboard.errors import OnboardError, unfit_package
from onboard.workflow.processes.orphans import die_with
from onboard.workflow.processes.programs import Ends, ForkServer
from onboard.workflow.remote import frames
from onboard.workflow.remote.sandbox import Limits, enter
from onboard.workflow.remote.walls.bubblewrap import become_wrapped

_MODULE, _APART = "onboard.workflow.remote.child", "apart"
_CODE = "code"
_LATE = 30
"""Seconds after which the process ends by itself when the parent has not ended it."""


def main(parent: int, replies: int, limits: Limits, *, apart: bool) -> None:
    """Give up what is not needed; then take the model, and do one task after another."""
    folder = Path.cwd()
    if not apart:  # in bubblewrap the parent is not seen, and bubblewrap ends with it
        die_with(parent)
        become_wrapped(folder, limits.file_bytes, ["-m", _MODULE, *sys.argv[1:], _APART])
    ends = Pipe()  # behind the walls there is no more
    walls = enter(folder, limits, apart=apart)
    requests = _private(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    replies = _private(replies)
    model: dict[str, Any] = {}
    while (message := frames.read(requests)) is not None:
        request = json.loads(message)
        signal.alarm(int(limits.seconds) + _LATE)
        reply: dict[str, Any]
        if "code" in request:
            model, reply = request, {"result": None}
            _unpack(model["code"], folder / _CODE)
            if model["tests"] and "network" in walls:  # else sockets are refused in Python
                reply = _import_ahead(ends, requests, replies)
        elif "task" in request:
            reply = _reply(request, folder / _CODE, model["config"])
        else:
            reply = {"walls": walls}
        signal.alarm(0)
        frames.write(replies, json.dumps(reply).encode())
    os._exit(0)  # whatever threads the code has started


def _import_ahead(ends: Ends, *pipes: int) -> dict[str, Any]:
    """Have tests run in forks of this process as it is now, with the libraries and nothing of the
    repository imported, and without its pipes; return the reply.
    """
    try:
        from onboard.workflow.processes.warm import import_for_tests
        from onboard.workflow.remote.tasks import PROGRAMS

        import_for_tests()
    except Exception as error:
        if (unfit := unfit_package(error)) is None:
            raise
        return {"error": unfit.message, "hint": unfit.hint}
    PROGRAMS.append(ForkServer(ends, pipes))
    return {"result": None}


def _private(descriptor: int) -> int:
    """Move a pipe to where programs that the code starts do not have it."""
    moved = os.dup(descriptor)
    os.close(descriptor)
    return moved


def _unpack(files: dict[str, str], folder: Path) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode(errors="surrogateescape"))


def _reply(request: dict[str, Any], code: Path, config: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": _work(request, code, config)}
    except OnboardError as error:
        block = getattr(error, "block", "")
        return {"error": error.message, "hint": error.hint, "block": block}
    except BaseException as error:  # whatever the repository's code raises
        if (unfit := unfit_package(error)) is not None:
            return {"error": unfit.message, "hint": unfit.hint}
        from onboard.analysis.tiny.tiny_config import one_line

        traceback.print_exc()
        return {"error": f"the model's code failed ({one_line(error)})"}


def _work(request: dict[str, Any], code: Path, config: dict[str, Any]) -> Any:
    from onboard.analysis.repository import install
    from onboard.workflow.remote.tasks import TASKS

    # Tests do so in the process that they start
    if request["own_code"] and request["task"] != "run_pytest":
        install(code, config)
    return TASKS[request["task"]](code, config, **request["arguments"])


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        Limits.model_validate_json(sys.argv[3]),
        apart=_APART in sys.argv[4:],
    )
