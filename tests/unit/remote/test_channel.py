"""What a process may send to its parent: one reply of the schema, in time, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from onboard.errors import OnboardError
from onboard.workflow.remote.channel import Channel
from onboard.workflow.remote.code_session import LIMITS, OPEN_SESSIONS, Session
from onboard.workflow.remote.handed import require_inside, small_files
from onboard.workflow.remote.messages import REPLIES, Generated
from onboard.workflow.remote.replies import Reply

_HEAD = """
REPLIES = {replies}
import os, sys, time
def send(data, length=None):
    data = data if isinstance(data, bytes) else data.encode()
    data = (len(data) if length is None else length).to_bytes(4, "big") + data
    while data:
        data = data[os.write({replies}, data):]
"""


@pytest.fixture
def started() -> Iterator[list[Channel]]:
    """Channels to close at the end."""
    channels: list[Channel] = []
    yield channels
    for channel in channels:
        channel.process.kill()
        channel.process.wait()
        channel.close()


def _channel(code: str, started: list[Channel]) -> Channel:
    replies, other = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", _HEAD.replace("{replies}", str(other)) + code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[other],
    )
    os.close(other)
    started.append(Channel(process, replies))
    return started[-1]


def test_a_large_request_and_a_reply_in_pieces_go_through(started: list[Channel]) -> None:
    code = """
size = int.from_bytes(os.read(0, 4), "big")
got = 0
while got < size:
    got += len(os.read(0, 1000))
    print("busy " * 9)
for _ in range(2):
    send(str(got)) if not _ else time.sleep(9)
"""
    channel = _channel(code, started)
    assert channel.exchange(b"x" * 300_000, 20) == b"300000"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("time.sleep(99)", "stopped after 2 s"),
        ("os.close(REPLIES); print('last \\x1b[2J words')", r"\(0\).*last \?\[2J words"),
        ("os._exit(7)", r"ended \(7\) without a result"),
        ("send(b'', 2**31)", "sent a reply of 2147483648 bytes"),
        (
            "os.write(REPLIES, bytes([0, 0, 0, 1, 49]) * 2); time.sleep(9)",
            "sent more than one reply",
        ),
        ("while True: print('x' * 10000)", "stopped after 2 s"),
        ("send('{', 10); time.sleep(99)", "stopped after 2 s"),
        ("os.close(0); os.close(1); os.close(2); time.sleep(99)", "stopped after 2 s"),
    ],
)
def test_what_is_no_reply_is_one_line_in_time(
    code: str, message: str, started: list[Channel]
) -> None:
    channel, begun = _channel(code, started), time.monotonic()
    with pytest.raises(OnboardError, match=message) as raised:
        channel.exchange(b"x" * 300_000, 2)
    assert str(raised.value).isprintable()
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    "reply",
    [
        '{"result": {"text": "x", "worst": 0.0, "path": "/etc/passwd"}}',
        '{"result": {"text": 5, "worst": 0.0}}',
        '{"result": {"text": "x", "worst": NaN}}',
        '{"result": {"text": "' + "x" * (2**20 + 1) + '", "worst": 0.0}}',
        '{"result": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"error": ["x"]}',
        "[]",
        "\x00",
    ],
)
def test_a_reply_that_breaks_the_schema_ends_the_process(
    reply: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session.__new__(Session)
    closed: list[bool] = []
    monkeypatch.setattr(session, "channel", _Says(reply), raising=False)
    monkeypatch.setattr(session, "limits", LIMITS, raising=False)
    monkeypatch.setattr(session, "close", lambda: closed.append(True))
    with pytest.raises(OnboardError, match="sent what is no reply") as raised:
        session._exchange({}, Reply[Generated])
    assert closed
    assert len(str(raised.value)) < 400


class _Says:
    def __init__(self, reply: str) -> None:
        self.reply = reply.encode()

    def exchange(self, request: bytes, seconds: float) -> bytes:
        return self.reply


def test_files_that_lie_elsewhere_are_not_handed_over(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "model", tmp_path / "key.py"
    folder.mkdir()
    elsewhere.write_text("secret = 1\n")
    (folder / "a.py").write_bytes(b"# \xff\n")
    (folder / "big.json").write_text(" " * (2**20 + 1))
    (folder / "link.py").symlink_to(elsewhere)
    (folder / "inner.py").symlink_to(folder / "a.py")
    os.mkfifo(folder / "pipe.py")
    assert sorted(small_files(folder)) == ["a.py", "inner.py"]
    assert small_files(folder)["a.py"].encode(errors="surrogateescape") == b"# \xff\n"
    require_inside(folder, ["a.py", "inner.py"])
    with pytest.raises(
        OnboardError, match=r"^link\.py of the model's code is a link that leads out"
    ):
        require_inside(folder, ["a.py", "link.py"])


def test_a_snapshot_of_the_cache_is_handed_over(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "0123").write_text("x = 1\n")
    (snapshot / "m.py").symlink_to(Path("..", "..", "blobs", "0123"))
    assert small_files(snapshot) == {"m.py": "x = 1\n"}
    require_inside(snapshot, ["m.py"])


_PARENT = """
import os, sys
from onboard.workflow.remote.code_session import Session
session = Session("k")
print(session.process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_the_process_ends_when_its_parent_is_killed() -> None:
    done = subprocess.run([sys.executable, "-c", _PARENT], capture_output=True, check=False)
    pid = int(done.stdout)
    for _ in range(100):
        if not Path(f"/proc/{pid}/cmdline").is_file() or _is_zombie(pid):
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} goes on")


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_session_says_its_walls_and_leaves_no_folder() -> None:
    session = Session("test")
    folder = session.folder
    assert session.hello.walls
    session.close()
    assert not folder.exists()
    assert "test" not in OPEN_SESSIONS


_TEST = """
import os, sys
def test_it():
    assert ("torch" in sys.modules) == TORCH
    assert os.environ["GIVEN"] == "7"
"""


@pytest.mark.parametrize("ahead", [True, False])
def test_tests_of_a_session_that_has_some_find_the_libraries_imported(ahead: bool) -> None:
    session = Session("test")
    try:
        session.give({}, {}, tests=ahead)
        found = ahead and "network" in session.hello.walls
        text = _TEST.replace("TORCH", str(found))
        arguments = {
            "files": {"test_it.py": text},
            "arguments": ["-p", "no:cacheprovider", "test_it.py"],
            "environment": {"GIVEN": "7"},
            "results": "none",
        }
        for _ in range(2):
            reply = session.ask("run_pytest", arguments, REPLIES["run_pytest"], own_code=True)
            assert reply.error is None
            assert reply.result is not None
            assert "1 passed" in reply.result.output
    finally:
        session.close()
