"""The back end `command`: any program that answers on its standard output or edits its copy of the
files.

It runs in a process of its own behind walls (`onboard.agents.back_ends.walled`), with nothing of this
process's environment but what a program needs to start and what the settings name.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from onboard.agents.refused import RefusedError, Usage
from onboard.agents.role_settings import Command
from onboard.agents.workspace import Event, Reply, Workspace
from onboard.errors import ConsentRequiredError
from onboard.workflow.remote.sandbox import WALLS, Limits, environment

_LATE = 30.0
"""Seconds after its time in which the walled process has to have said so."""
_GIBIBYTES = 0.25
"""Of all files that it writes."""
_AT_ONCE = 2**16
_BYTES_OF_TOKEN = 4


class _Result(BaseModel):
    """What the walled process tells; nothing else is taken."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lacking: list[str] = Field(default_factory=list, max_length=20)
    problem: str = Field(default="", max_length=2000)
    code: int = 0
    text: str = ""
    errors: str = ""
    files: dict[str, str] = Field(default_factory=dict)
    new: list[str] = Field(default_factory=list, max_length=1000)


@dataclass(frozen=True)
class CommandBackEnd:
    """Runs a command line once for each prompt."""

    settings: Command
    unsandboxed: bool = False
    """Run it where a wall is missing, too."""

    def ask(self, prompt: str, workspace: Workspace, event: Event) -> Reply:
        """Run the command; see `BackEnd`."""
        result = self._result(prompt, workspace)
        event(
            "command",
            {"code": result.code, "text": result.text, "errors": result.errors}
            | {"changed": sorted(result.files), "new": result.new, "problem": result.problem},
        )
        if result.lacking:
            what = "; ".join(f"{name}: {WALLS[name]}" for name in result.lacking if name in WALLS)
            raise ConsentRequiredError(
                f"this system cannot keep the agent's command from what is yours ({what})",
                hint="Run it on another (docs/remote_code.md says which), or with --unsandboxed",
            )
        text, usage = _unwrapped(result.text)
        if usage is None:
            usage = Usage((len(prompt) + len(result.text)) // _BYTES_OF_TOKEN, 0.0, True)
        if result.problem:
            raise RefusedError(result.problem, usage)
        return Reply(text, result.files, usage)

    def _result(self, prompt: str, workspace: Workspace) -> _Result:
        folder = Path(tempfile.mkdtemp(prefix="onboard-agent-")).resolve()
        try:
            sent = json.dumps(self._request(prompt, workspace)).encode()
            raw = self._exchange(sent, folder)
            return _Result.model_validate_json(raw)
        except ValidationError:
            raise RefusedError("the process that ran the command ended without a result") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _request(self, prompt: str, workspace: Workspace) -> dict[str, Any]:
        own = self.settings
        walls = [name for name in WALLS if not (own.network and name == "network")]
        return {
            "command": own.command,
            "prompt": prompt,
            "prompt_in": own.prompt,
            "files": workspace.files,
            "environment": {
                name: os.environ[name] for name in own.environment if name in os.environ
            },
            "reads": [str(path.expanduser().absolute()) for path in own.reads],
            "network": own.network,
            "walls": [] if self.unsandboxed else walls,
            "seconds": own.seconds,
            "output_bytes": own.output_bytes,
            "limits": Limits(seconds=own.seconds, file_gibibytes=_GIBIBYTES).model_dump(),
        }

    def _exchange(self, request: bytes, folder: Path) -> bytes:
        """Return what the walled process writes, and leave nothing of it running."""
        process = subprocess.Popen(
            [sys.executable, "-m", "onboard.agents.back_ends.walled", str(os.getpid())],
            cwd=folder,
            env=environment(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(request)
            most = 8 * (self.settings.output_bytes + 2**20)  # a letter takes six in JSON
            return _read(process.stdout.fileno(), most, self.settings.seconds + _LATE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()


def _read(descriptor: int, most: int, seconds: float) -> bytes:
    """Read to the end of a pipe, within bytes and time."""
    deadline, data = time.monotonic() + seconds, bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or len(data) > most:
                raise RefusedError("the process that ran the command did not answer as agreed")
            if selector.select(left):
                more = os.read(descriptor, _AT_ONCE)
                if not more:
                    return bytes(data)
                data += more


def _unwrapped(text: str) -> tuple[str, Usage | None]:
    """Return what a program said, out of the report that some print: an object with `result`,
    `usage` and `total_cost_usd`.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text, None
    if not isinstance(found, dict) or not isinstance(found.get("result"), str):
        return text, None
    usage = found["usage"] if isinstance(found.get("usage"), dict) else {}
    counts = [usage.get(name) for name in ("input_tokens", "output_tokens")]
    tokens = sum(each for each in counts if isinstance(each, int) and each > 0)
    cost = found.get("total_cost_usd")
    cost = float(cost) if isinstance(cost, int | float) and cost > 0 else 0.0
    return found["result"], Usage(tokens, cost)
