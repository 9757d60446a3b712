"""Linux's capabilities and namespaces: a process gives up the ones, and moves to the others."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from onboard.workflow.remote.walls.system import NO_NEW_PRIVILEGES, checked, libc

_NEW_USER = 0x10000000
_APART = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
"""Mounts, control groups, host name, System V objects, processes, network."""
_NEW_NETWORK = 0x40000000
_DROP_BOUND, _AMBIENT, _CLEAR_AMBIENT = 24, 47, 4
_VERSION, _MOST = 0x20080522, 64


def move_apart(*, network: bool = False) -> bool:
    """Move to namespaces of its own, but for the network where it is to be kept; return whether the
    system allows that.

    A user namespace is tried first, for root, too: what is root in there is nobody outside.
    """
    if sys.platform != "linux":
        return False
    user, group = os.getuid(), os.getgid()
    apart = _APART & ~_NEW_NETWORK if network else _APART
    if libc().unshare(_NEW_USER | apart) == 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        return True
    return bool(libc().unshare(apart) == 0)


def drop_privileges() -> bool:
    """Give up all capabilities for good; return whether none is left."""
    if sys.platform != "linux":
        return False
    for capability in range(_MOST):
        libc().prctl(_DROP_BOUND, capability, 0, 0, 0)
    libc().prctl(_AMBIENT, _CLEAR_AMBIENT, 0, 0, 0)
    header, nothing = (ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)()
    checked(libc().capset(header, nothing), "capset")
    checked(libc().prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no new privileges")
    return os.geteuid() != 0 or _bound_is_empty()


def _bound_is_empty() -> bool:
    """Whether a program that root starts gets no capability back."""
    return not any(libc().prctl(23, capability, 0, 0, 0) == 1 for capability in range(_MOST))
