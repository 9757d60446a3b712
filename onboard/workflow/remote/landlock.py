"""Linux's Landlock: a process gives up, for itself and its children, writing anywhere but below one
folder.

See the kernel's Documentation/userspace-api/landlock.rst, which the numbers below are from. No
privilege is needed.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH, _NO_NEW_PRIVILEGES = 1, 1, 38
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


def restrict_writes(folder: Path) -> int:
    """Forbid this process to write outside `folder`, open TCP connections and signal others, as far
    as the kernel can.

    Returns:
        The kernel's Landlock version; 0 where there is none, and nothing is restricted.
    """
    if sys.platform != "linux":
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    version = int(libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG))
    if version < 1:
        return 0
    rules = _Ruleset(_rights(version), _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    handle = _checked(libc.syscall(_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(size), 0))
    _allow(libc, handle, folder, rules.fs)
    _allow(libc, handle, Path(os.devnull), rules.fs & (_WRITE_FILE | _TRUNCATE | _IOCTL_DEVICE))
    _checked(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _checked(libc.syscall(_RESTRICT_SELF, handle, 0))
    os.close(handle)
    return version


def _rights(version: int) -> int:
    return (
        _WRITE_FILE
        | _CHANGE
        | (_REFER if version >= 2 else 0)
        | (_TRUNCATE if version >= 3 else 0)
        | (_IOCTL_DEVICE if version >= 5 else 0)
    )


def _allow(libc: ctypes.CDLL, handle: int, path: Path, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = _PathBeneath(rights, descriptor)
    _checked(libc.syscall(_ADD_RULE, handle, _PATH_BENEATH, ctypes.byref(rule), 0))
    os.close(descriptor)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "landlock")
    return result
