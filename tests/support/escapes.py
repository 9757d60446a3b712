"""What hostile code tries: each attempt is a function of the places that it is after, and passes when
it got there. Imports are the standard library's alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
_X86 = platform.machine() == "x86_64"


def _call(number: tuple[int, int], *words: Any) -> None:
    """Make a call of the system, by its number on x86-64 and on aarch64."""
    if LIBC.syscall(number[0 if _X86 else 1], *words) < 0:
        raise OSError(ctypes.get_errno(), "refused")


def read_a_file(at: dict[str, Any]) -> None:
    Path(at["secret"]).read_text()


def read_by_a_link(at: dict[str, Any]) -> None:
    Path("link").symlink_to(at["secret"])
    Path("link").read_text()


def read_environments(at: dict[str, Any]) -> None:
    found = b""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            found += (folder / "environ").read_bytes() if folder.name.isdigit() else b""
    assert at["token"].encode() in found or at["token"] in str(os.environ)


def open_the_parents_memory(at: dict[str, Any]) -> None:
    Path(f"/proc/{at['parent']}/mem").open("rb").close()


def list_the_home(at: dict[str, Any]) -> None:
    assert os.listdir(Path(at["secret"]).parent)


def connect_by_path(at: dict[str, Any]) -> None:
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(at["listener"])
        stream.sendall(b"out")


def send_by_path_from_a_pair(at: dict[str, Any]) -> None:
    one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.sendto(b"out", at["listener"])


def connect_abstract(at: dict[str, Any]) -> None:
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect("\0" + at["abstract"])


def connect_tcp(at: dict[str, Any]) -> None:
    with socket.socket() as stream:
        stream.connect(("127.0.0.1", at["port"]))


def send_udp(at: dict[str, Any]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stream:
        stream.sendto(b"out", ("127.0.0.1", at["port"]))


def netlink(at: dict[str, Any]) -> None:
    descriptor = LIBC.socket(16, 3, 0)
    assert descriptor >= 0
    assert any(name != "lo" for _, name in socket.if_nameindex())


def write_outside(at: dict[str, Any]) -> None:
    Path(at["outside"], "new").write_text("x")


def append_outside(at: dict[str, Any]) -> None:
    with Path(at["secret"]).open("a") as file:
        file.write("x")


def truncate_outside(at: dict[str, Any]) -> None:
    os.truncate(at["secret"], 0)


def remove_outside(at: dict[str, Any]) -> None:
    Path(at["secret"]).unlink()


def link_outside(at: dict[str, Any]) -> None:
    os.link(at["secret"], "hard")


def make_a_folder_outside(at: dict[str, Any]) -> None:
    Path(at["outside"], "folder").mkdir()


def move_outside(at: dict[str, Any]) -> None:
    os.rename(at["secret"], at["secret"] + "2")


def link_to_the_inside(at: dict[str, Any]) -> None:
    Path(at["outside"], "way").symlink_to(".")


def write_to_a_fifo(at: dict[str, Any]) -> None:
    os.close(os.open(Path(at["outside"], "fifo"), os.O_RDWR | os.O_NONBLOCK))


def open_the_terminal(at: dict[str, Any]) -> None:
    os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))


def write_by_a_link(at: dict[str, Any]) -> None:
    Path("way").symlink_to(at["secret"])
    Path("way").write_text("x")


def change_the_mode(at: dict[str, Any]) -> None:
    os.chmod(at["secret"], 0o777)


def change_the_mode_of_python(at: dict[str, Any]) -> None:
    os.chmod(os.path.realpath(sys.executable), os.stat(sys.executable).st_mode)


def change_the_owner(at: dict[str, Any]) -> None:
    os.chown(at["secret"], os.getuid(), os.getgid())


def change_the_time(at: dict[str, Any]) -> None:
    os.utime(at["secret"], (1, 1))


def set_an_attribute(at: dict[str, Any]) -> None:
    os.setxattr(at["secret"], "user.x", b"x")


def set_a_flag(at: dict[str, Any]) -> None:
    """FS_IOC_SETFLAGS: that no time of access is kept."""
    handle = os.open(at["secret"], os.O_RDONLY)
    fcntl.ioctl(handle, 0x40086602, (ctypes.c_long * 1)(0x80))


def type_into_a_terminal(at: dict[str, Any]) -> None:
    """TIOCSTI; behind the wall the kernel says that this is none, or takes it."""
    try:
        with Path("/dev/null").open() as file:
            fcntl.ioctl(file, 0x5412, b"x")
    except OSError as error:
        if error.errno == errno.EPERM:
            raise


def set_an_attribute_by_number(at: dict[str, Any]) -> None:
    """file_setattr(2), of Linux 6.17."""
    _call((469, 469), -100, at["secret"].encode(), (ctypes.c_uint64 * 3)(), 24, 0)


def write_shared_memory(at: dict[str, Any]) -> None:
    path = Path("/dev/shm", at["token"])
    path.write_text("x")
    path.unlink()
    assert not Path("/dev/shm").is_symlink()


def signal_the_parent(at: dict[str, Any]) -> None:
    os.kill(at["parent"], 0)


def prioritise_the_parent(at: dict[str, Any]) -> None:
    os.setpriority(os.PRIO_PROCESS, at["parent"], 5)


def limit_the_parent(at: dict[str, Any]) -> None:
    resource.prlimit(at["parent"], resource.RLIMIT_NOFILE)


def trace_the_parent(at: dict[str, Any]) -> None:
    _call((101, 117), 16, at["parent"], 0, 0)
    LIBC.ptrace(17, at["parent"], 0, 0)


def read_the_parents_memory(at: dict[str, Any]) -> None:
    """Where it may, an address that is none is EFAULT."""
    piece = (ctypes.c_size_t * 2)(0, 1)
    try:
        _call((310, 270), at["parent"], piece, 1, piece, 1, 0)
    except OSError as error:
        if error.errno != errno.EFAULT:
            raise


def take_a_handle_of_the_parent(at: dict[str, Any]) -> None:
    _call((434, 434), at["parent"], 0)


def mount(at: dict[str, Any]) -> None:
    place = os.fsencode(at["outside"])
    _call((165, 40), b"tmpfs", place, b"tmpfs", ctypes.c_ulong(0), None)
    LIBC.umount2(place, 2)  # where it succeeds, which it must not, nothing of the machine is lost


def new_namespaces(at: dict[str, Any]) -> None:
    _call((272, 97), 0x10000000)


def clone_namespaces(at: dict[str, Any]) -> None:
    child = LIBC.syscall(56 if _X86 else 220, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    assert child > 0


def join_namespaces(at: dict[str, Any]) -> None:
    handle = os.open(f"/proc/{at['parent']}/ns/net", os.O_RDONLY)
    _call((308, 268), handle, 0)


def change_the_root(at: dict[str, Any]) -> None:
    os.chroot(".")


def name_the_host(at: dict[str, Any]) -> None:
    socket.sethostname(socket.gethostname())


def write_a_setting(at: dict[str, Any]) -> None:
    path = Path("/proc/sys/kernel/core_pattern")
    path.write_text(path.read_text())


def make_a_device(at: dict[str, Any]) -> None:
    os.mknod("disk", 0o600 | 0o060000, os.makedev(8, 0))


def account(at: dict[str, Any]) -> None:
    _call((163, 89), None)


def load_a_program(at: dict[str, Any]) -> None:
    union = (ctypes.c_uint32 * 32)(1, 4, 4, 1)
    _call((321, 280), 0, union, 128)


def make_a_ring(at: dict[str, Any]) -> None:
    _call((425, 425), 1, (ctypes.c_char * 120)())


def measure_the_kernel(at: dict[str, Any]) -> None:
    _call((298, 241), (ctypes.c_uint32 * 32)(1, 128), 0, -1, -1, 0)


def fault_by_itself(at: dict[str, Any]) -> None:
    _call((323, 282), 1)


def keep_a_key(at: dict[str, Any]) -> None:
    _call((248, 217), b"user", at["token"].encode(), b"x", 1, -3)


def share_memory(at: dict[str, Any]) -> None:
    _call((29, 194), 0, 4096, 0o1600)


def queue_messages(at: dict[str, Any]) -> None:
    _call((240, 180), b"onboard", 0o102, 0o600, None)


def mount_by_handles(at: dict[str, Any]) -> None:
    _call((428, 428), -100, b"/", 1)


def open_by_a_number(at: dict[str, Any]) -> None:
    _call((303, 264), -100, b".", (ctypes.c_uint32 * 40)(128), (ctypes.c_uint32 * 1)(), 0)


def change_the_layout(at: dict[str, Any]) -> None:
    _call((135, 92), 0xFFFFFFFF)  # asks alone


def take_memory_without_end(at: dict[str, Any]) -> None:
    bytearray(4 << 30)


def open_files_without_end(at: dict[str, Any]) -> None:
    kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(2000)]
    assert len(kept) == 2000


def write_a_file_without_end(at: dict[str, Any]) -> None:
    with Path("large").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 30)


def fill_its_folder(at: dict[str, Any]) -> None:
    for number in range(20):
        with Path(f"part{number}").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 10**7)


def raise_its_limits(at: dict[str, Any]) -> None:
    unlimited = resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_DATA, (unlimited, unlimited))


def gain_by_a_program(at: dict[str, Any]) -> None:
    status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, check=True).stdout
    line = next(line for line in status.decode().splitlines() if line.startswith("CapEff"))
    assert int(line.split()[1], 16) != 0


ATTEMPTS: dict[Callable[[dict[str, Any]], None], tuple[str, ...]] = {
    read_a_file: ("files",),
    read_by_a_link: ("files",),
    read_environments: ("processes",),
    open_the_parents_memory: ("processes",),
    list_the_home: ("files",),
    connect_by_path: ("calls", "files"),
    send_by_path_from_a_pair: ("calls", "files"),
    connect_abstract: ("calls", "network"),
    connect_tcp: ("calls", "network"),
    send_udp: ("calls", "network"),
    netlink: ("calls", "network"),
    write_outside: ("writing", "files"),
    append_outside: ("writing", "files"),
    truncate_outside: ("writing", "files"),
    remove_outside: ("writing", "files"),
    link_outside: ("writing", "files"),
    write_by_a_link: ("writing", "files"),
    make_a_folder_outside: ("writing", "files"),
    move_outside: ("writing", "files"),
    link_to_the_inside: ("writing", "files"),
    write_to_a_fifo: ("writing", "files"),
    open_the_terminal: ("writing", "files"),
    change_the_mode: ("calls", "files"),
    change_the_mode_of_python: ("calls", "files"),
    change_the_owner: ("calls", "files"),
    change_the_time: ("calls", "files"),
    set_an_attribute: ("calls", "files"),
    set_a_flag: ("calls", "files"),
    type_into_a_terminal: ("calls",),
    set_an_attribute_by_number: ("calls",),
    write_shared_memory: ("writing", "files"),
    signal_the_parent: ("processes",),
    prioritise_the_parent: ("processes",),
    limit_the_parent: ("processes",),
    trace_the_parent: ("calls", "processes"),
    read_the_parents_memory: ("calls", "processes"),
    take_a_handle_of_the_parent: ("processes",),
    mount: ("calls", "privileges"),
    new_namespaces: ("calls",),
    clone_namespaces: ("calls",),
    join_namespaces: ("calls", "processes"),
    change_the_root: ("calls", "privileges"),
    name_the_host: ("calls", "privileges"),
    write_a_setting: ("writing", "files"),
    make_a_device: ("calls", "privileges"),
    account: ("calls", "privileges"),
    load_a_program: ("calls",),
    make_a_ring: ("calls",),
    measure_the_kernel: ("calls",),
    fault_by_itself: ("calls",),
    keep_a_key: ("calls",),
    share_memory: ("calls",),
    queue_messages: ("calls",),
    mount_by_handles: ("calls",),
    open_by_a_number: ("calls",),
    change_the_layout: ("calls",),
    gain_by_a_program: ("privileges",),
    take_memory_without_end: (),
    open_files_without_end: (),
    write_a_file_without_end: (),
    fill_its_folder: ("files",),
    raise_its_limits: ("privileges",),
}
"""Each attempt, and the walls of which one is enough to stop it; limits stand everywhere."""
HARMLESS = (
    *(list_the_home, write_outside, write_to_a_fifo, change_the_mode, change_the_time),
    *(
        write_shared_memory,
        change_the_layout,
        type_into_a_terminal,
        read_the_parents_memory,
        take_a_handle_of_the_parent,
    ),
)
"""What may get there on a machine without changing it: in the places given, with its owner's rights."""


def try_against(walls: list[str], at: dict[str, Any]) -> dict[str, str]:
    """Return what became of the attempts that one of these walls is to stop: "got there", or why not.

    No other is made: it would do to this machine what hostile code would.
    """
    stopped = [
        attempt for attempt, needed in ATTEMPTS.items() if not needed or set(needed) & set(walls)
    ]
    return {attempt.__name__: _outcome(attempt, at) for attempt in stopped}


def try_harmless(at: dict[str, Any]) -> dict[str, str]:
    """Return what became of those that may be made without any wall."""
    return {attempt.__name__: _outcome(attempt, at) for attempt in HARMLESS}


def _outcome(attempt: Callable[[dict[str, Any]], None], at: dict[str, Any]) -> str:
    try:
        attempt(at)
        return "got there"
    except (Exception, AssertionError) as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    """Enter the sandbox as a child does, then try; what is after comes as JSON on the command line,
    "bwrap" behind it has bubblewrap make the view.
    """
    from onboard.workflow.remote.sandbox import Limits, enter
    from onboard.workflow.remote.walls.bubblewrap import become_wrapped

    at, way, folder = json.loads(sys.argv[1]), sys.argv[2:], Path.cwd()
    if way == ["bwrap"]:
        become_wrapped(folder, 10**8, [__file__, sys.argv[1], "apart"])
    walls = enter(folder, Limits(seconds=60, gibibytes=2, file_gibibytes=0.1), apart=bool(way))
    print(json.dumps({"walls": walls, "way": way, "outcomes": try_against(walls, at)}), flush=True)


if __name__ == "__main__":
    main()
