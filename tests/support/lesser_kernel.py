"""`python lesser_kernel.py WALL,... -- COMMAND` runs a command where the kernel refuses what these walls are
made of, as older kernels and containers do; without "root" it is an ordinary user's, whom the system
has no entry of. Imports are the standard library's alone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from pathlib import Path

_CALLS = {
    "network": {"x86_64": 272, "aarch64": 97},  # unshare
    "files": {"x86_64": 165, "aarch64": 40},  # mount
    "writing": {"x86_64": 444, "aarch64": 444},  # landlock_create_ruleset
    "calls": {"x86_64": 157, "aarch64": 167},  # prctl, of the one option
}
WALLS = tuple(_CALLS)
"""Those that can be taken away."""
_SET_SECCOMP, _MODE_FILTER, _NO_NEW_PRIVILEGES = 22, 2, 38
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM


_NEW_USER, _USER = 0x10000000, 54321


def main(walls: str, command: list[str]) -> None:
    """Restrict this process, and become the command."""
    if walls == "root":
        _become_a_user()
    else:
        _refuse(walls)
    os.execv(command[0], command)


def _become_a_user() -> None:
    """Go by another number in a user namespace: a program that is started there has no privileges."""
    user, group = os.getuid(), os.getgid()
    assert ctypes.CDLL(None, use_errno=True).unshare(_NEW_USER) == 0
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{_USER} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{_USER} {group} 1")


def _refuse(walls: str) -> None:
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

    given = Program(len(lines), code)
    assert libc.prctl(_SET_SECCOMP, _MODE_FILTER, ctypes.byref(given), 0, 0) == 0


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[3:])
