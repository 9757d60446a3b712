"""Linux's seccomp: a process gives up, for itself and its children, calls of the system that code of
a model has no use for.

The filter is a program of the kernel's classic BPF (its Documentation/userspace-api/
seccomp_filter.rst); numbers of calls are those of arch/x86/entry/syscalls/syscall_64.tbl and of
include/uapi/asm-generic/unistd.h, which aarch64 has.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import sys
from collections.abc import Collection

from onboard.workflow.remote.walls.system import NO_NEW_PRIVILEGES, checked, libc

_SET_SECCOMP, _MODE_FILTER = 22, 2
_LOAD, _JUMP_EQUAL, _JUMP_ANY_BIT, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
# offsets in struct seccomp_data
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_OTHER_X86 = 0x40000000  # calls of the x32 interface begin here
_NEW_NAMESPACES = 0x7E020000  # flags of clone(2)

# name -> number on x86-64, on aarch64 (-1: it has none)
_REFUSED = {
    # sockets: there is no network, and one with a path would lead to services of the machine
    "socket": (41, 198),
    "socketpair": (53, 199),
    # what the kernel runs or does for a process without these calls
    "bpf": (321, 280),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    # keys, and other processes
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    # the view of the file system, and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "unshare": (272, 97),
    "setns": (308, 268),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # modes, owners, times and attributes, which Landlock says nothing of
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, -1),
    "fchown": (93, 55),
    "lchown": (94, -1),
    "fchownat": (260, 54),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "mknod": (133, -1),
    "mknodat": (259, 33),
    # what outlives a process
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    # the machine itself
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    "personality": (135, 92),
    "vhangup": (153, 58),
}
_ABSENT = {"clone3": (435, 435)}
"""Calls whose flags lie in memory, where no filter sees them: the C library takes the older ones."""
_CLONE = (56, 220)
_IOCTL = (16, 29)
# its requests -> what each does, whatever the file was opened for
_REQUESTS = {
    0x40086602: "sets a file's flags",
    0x40046602: "the same, of 32 bits",
    0x401C5820: "sets a file's extended flags",
    0x5412: "types into a terminal",
    0x541C: "pastes into a terminal",
}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


_SOCKETS = ("socket", "socketpair")


def restrict_calls(*, network: bool = False) -> bool:
    """Refuse these calls to this process, which has one thread, and to all that it starts, but for
    those of a `network`; return whether the kernel took the filter.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _ARCHITECTURES:
        return False
    code = program(machine, kept=_SOCKETS if network else ())
    given = _Program(len(code) // 8, code)
    checked(libc().prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no new privileges")
    return bool(libc().prctl(_SET_SECCOMP, _MODE_FILTER, ctypes.byref(given), 0, 0) == 0)


def refused(machine: str) -> dict[str, int]:
    """Return the numbers of the refused calls of a machine by name."""
    column = list(_ARCHITECTURES).index(machine)
    return {name: row[column] for name, row in _REFUSED.items() if row[column] >= 0}


def program(machine: str, kept: Collection[str] = ()) -> bytes:
    """Return the filter of a machine, which lets the calls of these names through: eight bytes an
    instruction.
    """
    column = list(_ARCHITECTURES).index(machine)
    denied, absent = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    lines = [_line(_LOAD, _ARCHITECTURE), *_unless(_ARCHITECTURES[machine], denied)]
    lines += [_line(_LOAD, _NUMBER), *_when(_JUMP_AT_LEAST, _OTHER_X86, denied)]
    for name, number in refused(machine).items():
        lines += [] if name in kept else _when(_JUMP_EQUAL, number, denied)
    for row in _ABSENT.values():
        lines += _when(_JUMP_EQUAL, row[column], absent)
    flags = _when(_JUMP_ANY_BIT, _NEW_NAMESPACES, denied)
    requests = [line for word in _REQUESTS for line in _when(_JUMP_EQUAL, word, denied)]
    lines += _where(_CLONE[column], _FIRST_ARGUMENT, flags)
    lines += _where(_IOCTL[column], _SECOND_ARGUMENT, requests)
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _where(call: int, argument: int, answers: list[bytes]) -> list[bytes]:
    """Answer by the low half of an argument where the call is this one; else go on."""
    behind = [_line(_LOAD, argument), *answers, _line(_RETURN, _ALLOW)]
    return [_line(_JUMP_EQUAL, call, 0, len(behind)), *behind]


def _when(jump: int, value: int, answer: int) -> list[bytes]:
    """Answer where a comparison holds; else go on."""
    return [_line(jump, value, 0, 1), _line(_RETURN, answer)]


def _unless(value: int, answer: int) -> list[bytes]:
    """Answer where what was loaded is another value; else go on."""
    return [_line(_JUMP_EQUAL, value, 1, 0), _line(_RETURN, answer)]


def _line(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("=HBBI", code, then, otherwise, value)
