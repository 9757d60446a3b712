"""Linux's Landlock: a process gives up, for itself and its children, writing anywhere but below one
folder, and reading anywhere but in some.

See the kernel's Documentation/userspace-api/landlock.rst, which the numbers below are from. No
privilege is needed.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from onboard.workflow.remote.walls.system import NO_NEW_PRIVILEGES, checked, libc

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_DEVICES = tuple(Path("/dev", name) for name in ("null", "zero", "full", "random", "urandom"))
_EXECUTE, _READ_FILE, _READ_FOLDER = 1 << 0, 1 << 2, 1 << 3
_READ = _EXECUTE | _READ_FILE | _READ_FOLDER
_WRITE_FILE, _TRUNCATE, _IOCTL_DEVICE, _REFER = 1 << 1, 1 << 14, 1 << 15, 1 << 13
_CHANGE = sum(1 << bit for bit in range(4, 13))
"""Remove and make files, folders, links, sockets and devices."""
_TCP = 0b11
_SCOPES = 0b11
"""Abstract sockets of, and signals to, processes outside."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("access", ctypes.c_uint64), ("folder", ctypes.c_int32))


def restrict_files(
    folder: Path, readable: Iterable[Path], listed: Path, *, network: bool = False
) -> int:
    """Forbid this process to write outside `folder`, read outside it and `readable`, list what is
    outside these and `listed`, signal others and, but for `network`, open TCP connections, as far
    as the kernel can.

    Returns:
        The kernel's Landlock version; 0 where there is none, and nothing is restricted.
    """
    if sys.platform != "linux":
        return 0
    call = libc().syscall
    version = int(call(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG))
    if version < 1:
        return 0
    tcp = _TCP if version >= 4 and not network else 0
    rules = _Ruleset(_rights(version), tcp, _SCOPES if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    handle = checked(
        call(_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(size), 0), "landlock"
    )
    _allow(handle, folder, rules.fs)
    device = _READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL_DEVICE
    for path in _DEVICES:
        _allow(handle, path, rules.fs & device)
    for path in readable:
        _allow(handle, path, _READ if path.is_dir() else _EXECUTE | _READ_FILE)
    _allow(handle, listed, _READ_FOLDER)
    checked(libc().prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no new privileges")
    checked(call(_RESTRICT_SELF, handle, 0), "landlock")
    os.close(handle)
    return version


def _rights(version: int) -> int:
    return (
        _READ
        | _WRITE_FILE
        | _CHANGE
        | (_REFER if version >= 2 else 0)
        | (_TRUNCATE if version >= 3 else 0)
        | (_IOCTL_DEVICE if version >= 5 else 0)
    )


def _allow(handle: int, path: Path, rights: int) -> None:
    if not path.exists():
        return
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = _PathBeneath(rights, descriptor)
    checked(libc().syscall(_ADD_RULE, handle, _PATH_BENEATH, ctypes.byref(rule), 0), "landlock")
    os.close(descriptor)
