"""What the process that runs a repository's code gives up before it imports any of it.

What holds, and on which systems, is said in docs/remote_code.md; `enter` says what holds in this
process.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from onboard.config import StrictModel
from onboard.workflow.remote.walls.landlock import restrict_files
from onboard.workflow.remote.walls.privileges import drop_privileges, move_apart
from onboard.workflow.remote.walls.seccomp import restrict_calls
from onboard.workflow.remote.walls.system import libc
from onboard.workflow.remote.walls.view import PACKAGE, enter_view, readable

_DIE_WITH_PARENT = 1
_MOST_FILES, _MOST_PROCESSES = 1024, 1024
"""Open files of a process; processes and threads of a user namespace (root is not counted)."""
_OF_NETWORK = tuple(Path("/etc", name) for name in ("resolv.conf", "hosts", "ssl", "pki"))
"""What programs look up names and check certificates with."""


class Limits(StrictModel):
    """Bounds of one child process."""

    seconds: float = 600.0
    """Of wall time; as many of processor time for each core."""
    gibibytes: float = 8.0
    """Of the process's own data."""
    file_gibibytes: float = 2.0
    """Of any file that it writes; of all together where it has a folder in memory."""

    @property
    def file_bytes(self) -> int:
        """`file_gibibytes` in bytes."""
        return int(self.file_gibibytes * 2**30)


WALLS = {
    "files": "it reads any file of yours",
    "writing": "it writes any file of yours",
    "network": "it has the network",
    "processes": "it sees your other processes, and what it starts may outlive it",
    "privileges": "it may use the privileges that you have",
    "calls": "it may make any call of the system",
}
"""What stands between the code and the machine -> what it means when it is missing."""


def missing(walls: Collection[str]) -> list[str]:
    """Return the walls that do not hold, of those that do."""
    return [name for name in WALLS if name not in walls]


def enter(
    folder: Path,
    limits: Limits,
    *,
    apart: bool = False,
    more: Sequence[Path] = (),
    network: bool = False,
) -> list[str]:
    """Restrict this process, which has one thread and has imported nothing of the repository;
    return which of `WALLS` now hold.

    `more` may be read, too, and the `network` is kept where it is asked for.

    It goes on in a child of the process that called, which waits and ends as the child does; but
    where another program (`onboard.workflow.remote.walls.bubblewrap`) has moved it `apart` already.
    """
    _limit_resources(limits)
    more = [*more, *(_OF_NETWORK if network else ())]
    walls = (
        ["files", "network", "processes"] if apart else _move_apart(folder, limits, more, network)
    )
    if "network" not in walls and not network:
        _refuse_sockets()
    seen = [*readable(more), Path("/proc")]
    held = {
        "writing": restrict_files(folder, seen, PACKAGE.parent, network=network) > 0,
        "privileges": drop_privileges(),
        "calls": restrict_calls(network=network),
    }
    return [*walls, *(name for name, holds in held.items() if holds)]


def _move_apart(folder: Path, limits: Limits, more: Sequence[Path], network: bool) -> list[str]:
    apart = [] if network else ["network"]
    if not move_apart(network=network):
        _become_first_process()
        return []
    _limit(resource.RLIMIT_NPROC, _MOST_PROCESSES)
    _become_first_process()
    try:
        enter_view(folder, limits.file_bytes, more)
    except OSError as error:
        print(f"no view of its own: {error}", file=sys.stderr)
        return [*apart, "processes"]
    return ["files", *apart, "processes"]


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of the child: none that may hold a secret, homes and caches in the
    temporary folder.
    """
    kept = (
        "PATH",
        "LANG",
        "LC_ALL",
        "PYTHONPATH",
        "VIRTUAL_ENV",
        "LD_LIBRARY_PATH",
        "OMP_NUM_THREADS",
        "ONBOARD_SEED",
    )
    own = {key: value for key in kept if (value := os.environ.get(key)) is not None}
    homes = dict.fromkeys(
        ("HOME", "TMPDIR", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"), str(folder)
    )
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**own, **homes, **offline, "PYTHONDONTWRITEBYTECODE": "1"}


def _limit_resources(limits: Limits) -> None:
    _limit(resource.RLIMIT_DATA, int(limits.gibibytes * 2**30))
    _limit(resource.RLIMIT_FSIZE, limits.file_bytes)
    _limit(resource.RLIMIT_CPU, int(limits.seconds * (os.cpu_count() or 1)) + 1)
    _limit(resource.RLIMIT_NOFILE, _MOST_FILES)
    _limit(resource.RLIMIT_CORE, 0)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _become_first_process() -> None:
    """Go on in a new process, the first of the namespace if there is one: with it ends whatever it
    starts, and it ends with this one.
    """
    life, held = os.pipe()
    started = os.fork()
    if started:
        os.close(life)
        _, status = os.waitpid(started, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    os.close(held)
    if sys.platform == "linux":
        libc().prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if select.select([life], [], [], 0)[0]:  # the parent has ended before that was said
        os._exit(1)


def _refuse_sockets() -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise OSError("code of a model's repository has no network")

    for name in ("socket", "create_connection", "getaddrinfo", "socketpair"):
        setattr(socket, name, refuse)
