"""Hostile code tries whatever it can think of; what the walls of this machine promise holds, and where
one is missing nothing is run unasked.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onboard.errors import ConsentRequiredError
from onboard.workflow.remote import client
from onboard.workflow.remote.code_session import OPEN_SESSIONS
from onboard.workflow.remote.sandbox import WALLS, environment, missing
from onboard.workflow.remote.walls import seccomp
from tests.support.escapes import ATTEMPTS, try_harmless
from tests.support.hostile import places_of
from tests.support.walls import lacking, take_away

ROOT = Path(__file__).parents[3]
linux = pytest.mark.skipif(sys.platform != "linux", reason="these walls are Linux's")


@pytest.fixture
def places(tmp_path: Path) -> Iterator[dict[str, Any]]:
    with places_of(tmp_path) as found:
        yield found


def _state(path: Path) -> tuple[Any, ...]:
    stat = path.stat()
    return (path.read_text(), stat.st_mode, stat.st_uid, stat.st_mtime_ns, stat.st_nlink)


def _try(
    places: dict[str, Any], folder: Path, *, wrapper: Sequence[str] = (), way: Sequence[str] = ()
) -> dict[str, Any]:
    program = str(ROOT / "tests/support/escapes.py")
    command = [*wrapper, sys.executable, program, json.dumps(places), *way]
    given = {**environment(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=given, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _past(found: dict[str, Any]) -> list[str]:
    """Return the attempts that got past the walls that hold."""
    assert found["outcomes"].keys() <= {attempt.__name__ for attempt in ATTEMPTS}
    return [name for name, outcome in found["outcomes"].items() if outcome == "got there"]


@linux
def test_nothing_that_hostile_code_tries_gets_past_the_walls_that_hold(
    places: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", places["token"])
    folder = tmp_path / "own"
    folder.mkdir()
    before = _state(Path(places["secret"]))
    found = _try(places, folder)
    print(json.dumps(found, indent=1))
    assert _past(found) == []
    assert "privileges" in found["walls"]
    if Path("/proc/sys/kernel/seccomp/actions_avail").exists():
        assert "calls" in found["walls"]
    if not missing(found["walls"]):
        assert len(found["outcomes"]) == len(ATTEMPTS)
        assert _state(Path(places["secret"])) == before
        assert sorted(os.listdir(places["outside"])) == ["fifo", "key"]


@linux
def test_harmless_attempts_get_there_without_walls(places: dict[str, Any], tmp_path: Path) -> None:
    outcomes = try_harmless(places)
    Path(places["outside"], "new").unlink()
    assert set(outcomes.values()) == {"got there"}, outcomes


@linux
@pytest.mark.parametrize("wall", ["network", "files", "writing", "calls"])
def test_where_a_wall_is_missing_nothing_runs_unasked(
    wall: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_away(wall, tmp_path, monkeypatch)
    folder = tmp_path / "model"
    folder.mkdir()
    source = SimpleNamespace(config=lambda: {"model_type": "x"}, files=lambda: folder)
    options = SimpleNamespace(trust_remote_code=True, unsandboxed=False)
    context: Any = SimpleNamespace(source=source, options=options, work_dir=tmp_path)
    with pytest.raises(ConsentRequiredError, match=rf"{wall}: .*--unsandboxed") as raised:
        client.walls(context)
    assert raised.value.exit_code == 3
    assert not OPEN_SESSIONS

    options.unsandboxed = True
    walls = client.walls(context)
    client.close_sessions()
    assert wall in walls["missing"]
    assert {*walls["hold"], *walls["missing"]} == WALLS.keys()


@linux
@pytest.mark.parametrize("without", ["files", "writing,calls", "network,writing", "network,calls"])
def test_the_other_walls_hold_where_some_are_missing(
    without: str, places: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    found = _try(places, folder, wrapper=lacking(without.split(",")))
    assert not set(without.split(",")) & set(found["walls"])
    assert _past(found) == []


@linux
def test_an_ordinary_user_has_the_same_walls(places: dict[str, Any], tmp_path: Path) -> None:
    """One without an entry in /etc/passwd, as in containers."""
    folder = tmp_path / "own"
    folder.mkdir()
    try:
        found = _try(places, folder, wrapper=lacking(["root"]))
    except AssertionError as error:
        if "_become_a_user" not in str(error):
            raise
        pytest.skip("this system has no user namespaces, and the user is told so")
    assert _past(found) == []
    assert missing(found["walls"]) == []


@linux
def test_both_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    """The code starts a program in a session of its own and sleeps; the parent is killed."""
    code = (
        "import os, subprocess, sys, time\n"
        "from pathlib import Path\n"
        "from onboard.workflow.processes.orphans import die_with\n"
        "from onboard.workflow.remote.sandbox import Limits, enter\n"
        "die_with(int(sys.argv[1]))\n"
        "walls = enter(Path.cwd(), Limits())\n"
        "subprocess.Popen(['sleep', sys.argv[2]], start_new_session=True)\n"
        "print(*walls, flush=True)\n"
        "time.sleep(99)\n"
    )
    seconds = f"{random.randint(1000, 9000)}.{random.randint(1, 9**9)}"
    parent = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid()), sys.argv[2]],"
        " stdout=subprocess.PIPE)\n"
        "print(child.stdout.readline().decode(), end='', flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", parent, code, seconds],
        cwd=tmp_path,
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.strip()
    if b"processes" not in done.stdout.split():
        pytest.skip("this system has no process namespace, and the user is told so")
    for _ in range(100):
        if not _commands_with(seconds):
            return
        time.sleep(0.1)
    raise AssertionError(_commands_with(seconds))


def _commands_with(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in text:
            found.append(text)
    return found


@linux
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_nothing_gets_past_bubblewrap(places: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    before = _state(Path(places["secret"]))
    found = _try(places, folder, way=["bwrap"])
    print(json.dumps(found, indent=1))
    assert _past(found) == []
    assert found["way"] == ["apart"]
    assert len(found["outcomes"]) == len(ATTEMPTS)
    assert _state(Path(places["secret"])) == before


_KNOWN = {"x86_64": "x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}


@pytest.mark.parametrize("machine", _KNOWN)
def test_numbers_of_calls_are_the_kernels(machine: str) -> None:
    header = Path("/usr/include", _KNOWN[machine])
    if not header.is_file():
        pytest.skip("the kernel's headers are not installed")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    known = {name: int(number) for name, number in found}
    wrong = {
        name: number
        for name, number in seccomp.refused(machine).items()
        if known.get(name, number) != number
    }
    assert wrong == {}
    assert len(seccomp.refused(machine).keys() & known.keys()) > 60


@pytest.mark.parametrize("machine", _KNOWN)
def test_the_filter_is_one_that_the_kernel_takes(machine: str) -> None:
    code = seccomp.program(machine)
    assert len(code) % 8 == 0
    assert len(code) // 8 < 4096
    jumps = [code[at : at + 8] for at in range(0, len(code), 8)]
    for place, line in enumerate(jumps):
        if line[0] in (0x15, 0x35, 0x45):
            assert place + 1 + max(line[2], line[3]) < len(jumps)
