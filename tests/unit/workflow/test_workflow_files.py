from __future__ import annotations

import json
import os
import threading
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest

from onboard.errors import OnboardError, UsageError
from onboard.workflow.files import FileWriter, write_atomically
from onboard.workflow.lock import check_writable, exclusive, slug
from onboard.workflow.run_state import RunState, written_under


def nothing() -> None:
    """Nobody waits."""


def test_a_new_text_replaces_the_old_one_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.txt"
    write_atomically(path, "one\n")
    reader = path.open()
    write_atomically(path, "two\n")
    assert reader.read() == "one\n"
    assert path.read_text() == "two\n"
    assert os.listdir(path.parent) == ["file.txt"]


def test_files_have_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_atomically(tmp_path / "file", "text")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_an_equal_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    FileWriter().write(path, "text\n")
    os.utime(path, (1, 1))
    FileWriter().write(path, "text\n")
    assert path.stat().st_mtime == 1
    path.write_bytes(b"text\r\n")
    FileWriter().write(path, "text\n")
    assert path.read_bytes() == b"text\n"


def test_a_failed_write_is_explained_and_cleaned_up(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OnboardError, match="folder cannot be written"):
        write_atomically(tmp_path / "folder", "text", staging=tmp_path / "staging")
    assert os.listdir(tmp_path / "staging") == []


def test_a_dry_run_reads_what_it_would_have_written(tmp_path: Path) -> None:
    files = FileWriter(dry_run=True)
    (tmp_path / "old").write_text("a\nb\n")
    files.write(tmp_path / "old", "a\nc\n")
    files.write(tmp_path / "new", "n\n")
    assert (files.read(tmp_path / "old"), files.read(tmp_path / "new")) == ("a\nc\n", "n\n")
    assert files.exists(tmp_path / "new")
    assert not files.exists(tmp_path / "none")
    assert files.digest(tmp_path / "none") is None
    assert (tmp_path / "old").read_text() == "a\nb\n"
    assert not (tmp_path / "new").exists()
    assert (
        files.diff(tmp_path / "old", tmp_path)
        == "--- a/old\n+++ b/old\n@@ -1,2 +1,2 @@\n a\n-b\n+c"
    )
    assert files.diff(tmp_path / "new", tmp_path).startswith("--- /dev/null\n+++ b/new\n")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("gpt2", "gpt2"),
        ("org/Name-1.5B", "org--Name-1.5B"),
        ("a b", "a-b-c8687a08"),
        ("..", None),
        ("x'); import os", None),
    ],
)
def test_slug(
    model: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    name = slug(model)
    assert expected is None or name == expected
    assert Path(name).name == name
    assert name not in ("", ".", "..")


def test_slug_of_a_folder_is_its_name(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    assert (
        slug(str(tmp_path / "tiny"))
        == slug(f"{tmp_path}/tiny/")
        == slug(f"{tmp_path}/tiny/../tiny")
        == "tiny"
    )
    (tmp_path / "..hidden").mkdir()
    assert slug(str(tmp_path / "..hidden")) != slug("hidden")


def test_nothing_is_left_when_nothing_was_written(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    with exclusive(root / ".onboard" / "model", waiting=nothing):
        assert (root / ".onboard" / "model.lock").exists()
    assert not (tmp_path / "a").exists()


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    work_dir = tmp_path / ".onboard" / "model"
    (work_dir / "tmp").mkdir(parents=True)
    (work_dir / "tmp" / ".modeling.py.1234").write_text("half")
    (work_dir / "gather.json").write_text("{}")
    with exclusive(work_dir, waiting=nothing):
        assert not (work_dir / "tmp").exists()
    assert os.listdir(work_dir) == ["gather.json"]
    assert os.listdir(tmp_path / ".onboard") == ["model"]


def test_one_at_a_time(tmp_path: Path) -> None:
    work_dir = tmp_path / ".onboard" / "model"
    waited, entered = threading.Event(), threading.Event()

    def second() -> None:
        with exclusive(work_dir, waiting=waited.set):
            entered.set()

    thread = threading.Thread(target=second)
    with exclusive(work_dir, waiting=nothing):
        thread.start()
        assert waited.wait(10)
        assert not entered.wait(0.2)
    assert entered.wait(10)
    thread.join()
    assert os.listdir(tmp_path) == []


def test_roots_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    check_writable(tmp_path / "new" / "folder")
    with pytest.raises(UsageError, match="is not a folder"):
        check_writable(tmp_path / "file" / "below")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(OnboardError, match="cannot be written"):
        check_writable(tmp_path / "new" / "folder")


def test_a_users_file_is_kept_and_replaced_only_when_asked(tmp_path: Path) -> None:
    files = FileWriter(root=tmp_path)
    path = tmp_path / "file.py"
    assert files.put(path, "ours\n")
    assert files.put(path, "ours too\n")
    path.write_text("theirs\n")
    assert not files.put(path, "ours again\n")
    assert path.read_text() == "theirs\n"
    files.replacing = True
    assert files.put(path, "ours again\n")
    [replaced] = files.replaced
    assert (path.read_text(), replaced.backup.read_text()) == ("ours again\n", "theirs\n")
    assert "-theirs" in replaced.diff
    assert "+ours again" in replaced.diff
    assert files.written.keys() == {"file.py"}


def test_a_file_that_another_models_run_left_is_no_users(tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    first = FileWriter(root=tmp_path)
    first.put(path, "shared\n")
    state = RunState(model="first", written=first.written)
    (tmp_path / "work" / "first").mkdir(parents=True)
    (tmp_path / "work" / "first" / "state.json").write_text(state.text())
    stranger = FileWriter(root=tmp_path)
    assert not stranger.put(path, "other\n")
    relative = FileWriter(root=tmp_path, written_by_others=lambda: written_under(tmp_path / "work"))
    assert relative.put(path, "other\n")


def test_no_run_sees_a_file_before_it_is_known_who_wrote_it(tmp_path: Path) -> None:
    """Wherever a run is killed, what it left is not a user's: neither the old file nor the new
    one.
    """
    path, seen = tmp_path / "file.py", list[tuple[str, int]]()

    def remember() -> None:
        seen.append((path.read_text() if path.exists() else "", len(files.written["file.py"])))
        assert not files.is_users(path)

    files = FileWriter(root=tmp_path, remember=remember)
    for text in ("first\n", "second\n", "second\n", "first\n"):
        files.put(path, text)
    assert seen == [("", 1), ("first\n", 2), ("second\n", 2)]


def test_whose_a_file_is(tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    own, other = FileWriter(root=tmp_path), FileWriter(root=tmp_path)
    for files, relative in ((own, other), (other, own)):
        files.written_by_others = partial(_digests, relative)
    assert not own.is_anothers(path)
    own.put(path, "own\n")
    assert (own.is_anothers(path), other.is_anothers(path)) == (False, True)
    other.put(path, "other\n")
    assert (own.is_anothers(path), other.is_anothers(path)) == (True, False)
    path.write_text("a user's\n")
    assert (own.is_anothers(path), own.is_users(path)) == (False, True)


def _digests(files: FileWriter) -> dict[str, set[str]]:
    return {name: set(digests) for name, digests in files.written.items()}


def test_the_files_of_a_release_that_did_not_say_what_it_wrote_are_no_users(tmp_path: Path) -> None:
    path, config = tmp_path / "models" / "m.py", tmp_path / "registry" / "configs" / "m.yaml"
    for file in (path, config):
        write_atomically(file, "old\n")
    digest = sha256(b"old\n").hexdigest()
    left = {"model_file": path, "config": config}
    artifacts = {
        name: {"path": str(file.relative_to(tmp_path)), "sha256": digest}
        for name, file in left.items()
    }
    phases = {"generate": {"status": "done", "input_hash": "", "artifacts": artifacts}}
    write_atomically(
        tmp_path / "work" / "m" / "state.json", json.dumps({"model": "m", "phases": phases})
    )
    files = FileWriter(root=tmp_path, written=RunState.load(tmp_path / "work" / "m", "m").written)
    assert files.put(path, "new\n")
    assert not files.put(config, "new\n")  # it may have been kept as a user's
    path.write_text("edited\n")
    assert not files.put(path, "newer\n")
