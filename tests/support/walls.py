"""Systems that lack walls: `python -m tests.support.walls WALL,... -- COMMAND` runs a command where the
kernel refuses what these walls are made of, as older kernels and containers do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from pathlib import Path

import pytest

from onboard.workflow.remote.client import Session
from onboard.workflow.remote.sandbox import WALLS, missing

_CALLS = {
    "network": {"x86_64": 272, "aarch64": 97},  # unshare
    "files": {"x86_64": 165, "aarch64": 40},  # mount
    "writing": {"x86_64": 444, "aarch64": 444},  # landlock_create_ruleset
    "calls": {"x86_64": 157, "aarch64": 167},  # prctl, of the one option
}
_SET_SECCOMP, _MODE_FILTER, _NO_NEW_PRIVILEGES = 22, 2, 38
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM


def standing() -> list[str]:
    """Return the walls that hold on this machine."""
    session = Session("which walls")
    session.close()
    return session.hello.walls


def consent() -> list[str]:
    """Return the options with which the model's code runs on this machine."""
    lacking = missing(standing())
    return ["--trust-remote-code", *(["--unsandboxed"] if lacking else [])]


def take_away(walls: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Python programs started from here on run without some walls (joined by commas)."""
    program = folder / "python"
    here = Path(__file__).resolve()
    program.write_text(
        f'#!/bin/sh\nexec {sys.executable} {here} {walls} -- {sys.executable} "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def main(walls: str, command: list[str]) -> None:
    """Restrict this process, and become the command."""
    lines = [struct.pack("=HBBI", 0x20, 0, 0, 0)]
    for wall in walls.split(","):
        number, option = _CALLS[wall][platform.machine()], wall == "calls"
        lines.append(struct.pack("=HBBI", 0x15, 0, 4 if option else 1, number))
        if option:  # else prctl goes on
            lines += [struct.pack("=HBBI", 0x20, 0, 0, 16)]
            lines += [struct.pack("=HBBI", 0x15, 0, 1, _SET_SECCOMP)]
        lines.append(struct.pack("=HBBI", 0x06, 0, 0, _REFUSE))
        if option:
            lines.append(struct.pack("=HBBI", 0x06, 0, 0, _ALLOW))
    lines.append(struct.pack("=HBBI", 0x06, 0, 0, _ALLOW))
    code = b"".join(lines)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))

    assert (
        libc.prctl(_SET_SECCOMP, _MODE_FILTER, ctypes.byref(Program(len(lines), code)), 0, 0) == 0
    )
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[3:])

assert WALLS.keys() >= _CALLS.keys()
