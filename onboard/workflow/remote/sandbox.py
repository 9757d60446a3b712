"""What the process that runs a repository's code gives up before it imports any of it.

What holds, and on which systems, is said in docs/remote_code.md; `enter` says what holds in this
process.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

from onboard.config import StrictModel
from onboard.workflow.remote.landlock import restrict_writes

_NEW_NETWORK, _NEW_USER, _NEW_PROCESSES = 0x40000000, 0x10000000, 0x20000000
_DIE_WITH_PARENT = 1


class Limits(StrictModel):
    """Bounds of one child process."""

    seconds: float = 600.0
    """Of wall time; as many of processor time for each core."""
    gibibytes: float = 8.0
    """Of the process's own data."""
    file_gibibytes: float = 2.0
    """Of any file that it writes."""


def enter(folder: Path, limits: Limits) -> list[str]:
    """Restrict this process, which has one thread and has imported nothing of the repository; say
    what now holds.

    It goes on in a child of the process that called, which waits and ends as the child does.
    """
    facts = [_limit_resources(limits)]
    facts.append(_leave_network())
    _become_first_process()
    version = restrict_writes(folder)
    if version:
        facts.append(f"files: written below a temporary folder only (Landlock {version})")
    else:
        facts.append("files: NOT restricted (the system has no Landlock)")
    return facts


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


def _limit_resources(limits: Limits) -> str:
    data, size = (int(value * 2**30) for value in (limits.gibibytes, limits.file_gibibytes))
    seconds = int(limits.seconds * (os.cpu_count() or 1)) + 1
    for kind, value in (
        (resource.RLIMIT_DATA, data),
        (resource.RLIMIT_FSIZE, size),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    return f"limits: {limits.seconds:g} s, {limits.gibibytes:g} GiB of memory, files of {limits.file_gibibytes:g} GiB"


def _leave_network() -> str:
    """Move to a network namespace without any device; where that is not allowed, have Python refuse
    sockets.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        apart = _NEW_NETWORK | _NEW_PROCESSES
        if libc.unshare(apart) == 0 or libc.unshare(_NEW_USER | apart) == 0:
            return "network: none (a namespace of its own)"
    _refuse_sockets()
    return "network: refused in Python only (the system allows no namespace)"


def _become_first_process() -> None:
    """Go on in a new process, the first of the namespace if there is one: with it ends whatever it
    starts.
    """
    started = os.fork()
    if started:
        _, status = os.waitpid(started, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)


def _refuse_sockets() -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise OSError("code of a model's repository has no network")

    for name in ("socket", "create_connection", "getaddrinfo", "socketpair"):
        setattr(socket, name, refuse)
