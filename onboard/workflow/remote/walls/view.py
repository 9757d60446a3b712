"""What a child sees of the machine's files: what Python and its libraries need, to read, and one
folder of its own, to write.
"""

from __future__ import annotations

import ctypes
import os
import platform
import pwd
import sys
from collections.abc import Iterable
from pathlib import Path

from onboard.content import CONTENT_ROOT
from onboard.workflow.remote.walls.system import checked, libc

_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives"),
    *("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/localtime"),
    *("/sys/devices/system/cpu", "/sys/devices/system/node"),
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_CONTENT = ("models", "registry", "templates", "transforms")
PACKAGE = Path(__file__).resolve().parents[3]
"""Imports of it look through the names in the folder that it lies in."""

_NO_SETUID, _NO_DEVICES, _NO_PROGRAMS = 2, 4, 8
_BIND, _RECURSIVE, _PRIVATE, _DETACH = 0x1000, 0x4000, 0x40000, 2
_READ_ONLY, _ALL_BELOW, _HERE = 1, 0x8000, -100
_MOUNT_SETATTR, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}


def readable(more: Iterable[Path] = ()) -> list[Path]:
    """Return the files and folders that this interpreter, its libraries and this package need, and
    `more`; none lies in another of them.
    """
    program = os.path.dirname(os.path.realpath(sys.executable))
    python = [sys.prefix, sys.base_prefix, sys.exec_prefix, program]
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    paths = [Path(path) for path in (*_SYSTEM, *python, *sys.path, *libraries) if path]
    wide = {Path("/"), _home(), Path.cwd(), CONTENT_ROOT}
    paths = [path for path in paths if path.is_absolute() and path.resolve() not in wide]
    paths += [PACKAGE, *(CONTENT_ROOT / name for name in _CONTENT), *more]
    found: list[Path] = []
    for path in sorted({path for path in paths if path.exists()}, key=lambda path: path.parts):
        if not any(path.is_relative_to(other) for other in found):
            found.append(path)
    return found


def _home() -> Path:
    """Return the user's home; `/` for one that the system has no entry of, as containers have."""
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return Path("/")


def enter_view(folder: Path, num_bytes: int, more: Iterable[Path] = ()) -> None:
    """Have this process, alone in a mount namespace and the first of a process namespace, see
    nothing else but `more`; `folder`, which is empty, holds so many bytes, in memory.

    Raises:
        OSError: the kernel refuses a step, and the process sees what it saw.
    """
    _mount(None, Path("/"), None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", folder, "tmpfs", _NO_SETUID | _NO_DEVICES, "size=16m,mode=755")
    for path in readable(more):
        _show(path, folder, _NO_SETUID | _NO_DEVICES)
    for device in _DEVICES:
        _show(Path(device), folder, _NO_SETUID | _NO_PROGRAMS)
    _new_proc(folder)
    own = _below(folder, folder)
    own.mkdir(parents=True, exist_ok=True)
    _below(folder, Path("/run")).mkdir(exist_ok=True)
    _below(folder, Path("/dev/shm")).symlink_to(folder)
    _mount("tmpfs", own, "tmpfs", _NO_SETUID | _NO_DEVICES, f"size={num_bytes},mode=700")
    os.chdir(folder)
    # the old root under the new one, and away with it: pivot_root(2), "pivot_root(".", ".")"
    checked(libc().syscall(_PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    checked(libc().umount2(b".", _DETACH), "umount2")
    _forbid_changes(Path("/"), 0, _NO_SETUID | _NO_DEVICES)
    os.chdir(folder)


def _new_proc(root: Path) -> None:
    proc = _below(root, Path("/proc"))
    proc.mkdir()
    _mount("proc", proc, "proc", _NO_SETUID | _NO_DEVICES | _NO_PROGRAMS)
    _forbid_changes(proc, _ALL_BELOW, _NO_SETUID | _NO_DEVICES | _NO_PROGRAMS)


def _show(path: Path, root: Path, flags: int) -> None:
    """Make a file or folder, and a link to it by its other name, seen below a root; to read."""
    place, target = _below(root, path), path.resolve()
    if place.exists() or not path.exists():
        return
    if target != path:
        place.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(place):
            place.symlink_to(target)
        _show(target, root, flags)
        return
    if path.is_dir():
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    _mount(str(path), place, None, _BIND | _RECURSIVE)
    _forbid_changes(place, _ALL_BELOW, flags)


def _below(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _mount(source: str | None, place: Path, kind: str | None, flags: int, data: str = "") -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, place, kind)]
    result = libc().mount(*words, ctypes.c_ulong(flags), data.encode() or None)
    checked(result, f"mount {place}")


class _Attributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns"))


def _forbid_changes(place: Path, depth: int, flags: int) -> None:
    """mount_setattr(2), of Linux 5.12: it takes a mount with all below it, and clears nothing."""
    given = _Attributes(_READ_ONLY | flags, 0, 0, 0)
    words = (_HERE, os.fsencode(place), depth, ctypes.byref(given), ctypes.c_size_t(32))
    checked(libc().syscall(_MOUNT_SETATTR, *words), f"mount_setattr {place}")
