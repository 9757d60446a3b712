from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from onboard.errors import OnboardError
from onboard.git import NEUTRAL_IDENTITY, Checkout, branch_name, commit_of

BRANCH = "onboard/tiny"


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture(autouse=True)
def _own_git_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "GIT_AUTHOR_NAME",
        "GIT_AUTHOR_EMAIL",
        "GIT_COMMITTER_NAME",
        "GIT_COMMITTER_EMAIL",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    _git(folder, "init", "-q", "-b", "main")
    _git(folder, "config", "user.name", "Ada")
    _git(folder, "config", "user.email", "ada@example.org")
    (folder / "a.txt").write_text("a\n")
    (folder / ".gitignore").write_text("/workspace/\n")
    _git(folder, "add", "-A")
    _git(folder, "commit", "-q", "-m", "start")
    return folder


def _checkout(folder: Path) -> Checkout:
    checkout = Checkout.find(folder)
    assert checkout is not None
    return checkout


def _state(folder: Path) -> tuple[str, ...]:
    index = (folder / ".git" / "index").read_bytes().hex()
    return (
        index,
        _git(folder, "status", "--porcelain"),
        _git(folder, "rev-parse", "HEAD"),
        _git(folder, "branch", "--show-current"),
    )


def test_a_dirty_checkout_stays_as_it_is(repo: Path) -> None:
    (repo / "a.txt").write_text("changed\n")
    (repo / "staged.txt").write_text("staged\n")
    _git(repo, "add", "staged.txt")
    (repo / "new.txt").write_text("untracked\n")
    before = _state(repo)
    update = _checkout(repo).commit(BRANCH, {"models/m.py": "x = 1\n"}, "Onboard tiny")
    assert _state(repo) == before
    assert (repo / "a.txt").read_text() == "changed\n"
    assert update.status == "created"
    assert _git(repo, "show", "--name-status", "--format=%an <%ae>|%cn|%s|%P", BRANCH).split(
        "\n"
    ) == [
        f"Ada <ada@example.org>|Ada|Onboard tiny|{_git(repo, 'rev-parse', 'HEAD').strip()}",
        "",
        "A\tmodels/m.py",
        "",
    ]


def test_equal_files_make_no_second_commit_and_new_ones_go_on_top(repo: Path) -> None:
    checkout = _checkout(repo)
    first = checkout.commit(BRANCH, {"m.py": "x = 1\n"}, "one")
    same = checkout.commit(BRANCH, {"m.py": "x = 1\n"}, "one")
    assert (same.status, same.commit) == ("unchanged", first.commit)
    second = checkout.commit(BRANCH, {"m.py": "x = 2\n", "sub/n.py": ""}, "two")
    assert second.status == "updated"
    assert _git(repo, "log", "--format=%s", BRANCH).split() == ["two", "one", "start"]
    assert checkout.read("m.py", BRANCH) == "x = 2\n"
    assert checkout.read("a.txt", BRANCH) == "a\n"
    assert checkout.read("none.txt", BRANCH) is None


def test_a_branch_that_is_checked_out_is_left_alone(repo: Path) -> None:
    checkout = _checkout(repo)
    first = checkout.commit(BRANCH, {"m.py": "x = 1\n"}, "one")
    _git(repo, "checkout", "-q", BRANCH)
    update = checkout.commit(BRANCH, {"m.py": "x = 2\n"}, "two")
    assert (update.status, update.commit) == ("checked out", first.commit)
    assert _git(repo, "status", "--porcelain") == ""


def test_a_repository_without_commits_works(tmp_path: Path) -> None:
    _git(tmp_path, "init", "-q", "-b", "main", "empty")
    root = tmp_path / "empty"
    checkout = _checkout(root)
    assert checkout.read("m.py", BRANCH) is None
    update = checkout.commit(BRANCH, {"m.py": "x = 1\n"}, "one")
    assert _git(root, "ls-tree", "-r", "--name-only", BRANCH).split() == ["m.py"]
    assert (update.identity, update.identity_is_neutral) == (
        "{} <{}>".format(*NEUTRAL_IDENTITY),
        True,
    )
    assert checkout.commit(BRANCH, {"m.py": "x = 1\n"}, "one").status == "unchanged"


def test_a_root_below_the_checkout_commits_below_it(repo: Path) -> None:
    root = repo / "llm"
    root.mkdir()
    checkout = _checkout(root)
    checkout.commit(BRANCH, {"m.py": "x = 1\n"}, "one")
    assert _git(repo, "show", f"{BRANCH}:llm/m.py") == "x = 1\n"
    assert checkout.read("m.py", BRANCH) == "x = 1\n"


def test_no_checkout_outside_of_one_or_in_an_ignored_folder(repo: Path, tmp_path: Path) -> None:
    (repo / "workspace").mkdir()
    assert Checkout.find(repo / "workspace") is None
    outside = tmp_path / "outside"
    outside.mkdir()
    assert Checkout.find(outside) is None


def test_what_git_refuses_is_one_line(repo: Path) -> None:
    _git(repo, "branch", "onboard")
    with pytest.raises(OnboardError) as error:
        _checkout(repo).commit(BRANCH, {"m.py": "x = 1\n"}, "one")
    assert "onboard/tiny" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "label", ["qwen2.5-7b", "a..b", "x.lock", ".x.", "a b~^:?*[\\", "--", "org--name"]
)
def test_branch_names_are_valid(label: str) -> None:
    subprocess.run(["git", "check-ref-format", "--branch", branch_name(label)], check=True)


def test_a_checkout_of_another_user_has_no_commit_to_tell(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert commit_of(repo) == _git(repo, "rev-parse", "HEAD").strip()
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert commit_of(repo) == ""
