"""Opening and updating a pull request: what is refused, what is pushed, what is posted."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from onboard.errors import OnboardError, UsageError
from onboard.pull_request.forge.patience import UnreachableError
from onboard.pull_request.forge.posts import mark_of
from onboard.pull_request.pull_journal import PullJournal
from onboard.pull_request.pushed_proof import CommitProof
from onboard.registry import parse_entries
from tests.support.github import NAME, TOKEN, Fault, GitHub
from tests.support.pull_requests import BRANCH, MODEL_FILE, git, make_work, passed


def other_commit(hub: GitHub, folder: Path, path: str, text: str, branch: str = "main") -> str:
    """Somebody else pushes a commit."""
    clone = folder / f"clone-{len(list(folder.iterdir()))}"
    git(folder, "clone", "-q", "-b", branch, str(hub.bare), str(clone))
    (clone / path).parent.mkdir(parents=True, exist_ok=True)
    (clone / path).write_text(text)
    git(clone, "add", "-A")
    git(clone, "commit", "-q", "-m", "other")
    git(clone, "push", "-q", str(hub.bare), branch)
    return git(clone, "rev-parse", "HEAD")


def test_it_is_rebased_pushed_opened_and_its_logs_posted(
    hub: GitHub, root: Path, tmp_path: Path
) -> None:
    above = other_commit(hub, tmp_path, "other.txt", "x\n")
    status = git(root, "status", "--porcelain")
    journal = make_work(root).open()
    [pull] = hub.pulls
    assert (pull["head"]["ref"], pull["base"]["ref"]) == (BRANCH, "main")
    assert pull["title"] == "Onboard org/tiny"
    assert pull["body"].startswith("[AGENT]")
    assert "# Onboard org/tiny\n" in pull["body"]
    assert git(root, "rev-parse", f"{BRANCH}~1") == above
    assert hub.commit(BRANCH) == git(root, "rev-parse", BRANCH) == journal.pushed[-1]
    [run] = hub.texts()
    assert "tests: 1 passed" in pull["body"]
    assert "run: 1 passed" in run
    assert all(journal.pushed[-1] in text for text in (pull["body"], run))
    assert run.startswith("[AGENT]")
    assert git(root, "status", "--porcelain") == status
    assert git(root, "rev-parse", "--abbrev-ref", "HEAD") == "main"


def test_a_second_one_of_the_same_head_is_refused(hub: GitHub, root: Path) -> None:
    make_work(root).open()
    with pytest.raises(
        OnboardError, match=f"{BRANCH} has a pull request already: https://.*/pull/1"
    ):
        make_work_again(root).open()
    assert len(hub.pulls) == 1


def make_work_again(root: Path):
    os.environ["GH_TOKEN"] = TOKEN  # which was taken out as it was read
    return make_work(root)


def test_a_missing_head_is_refused(hub: GitHub, root: Path) -> None:
    git(root, "branch", "-D", BRANCH)
    with pytest.raises(UsageError, match=f"there is no branch {BRANCH}"):
        make_work(root).open()
    assert hub.pulls == []
    assert hub.commit(BRANCH) == ""


@pytest.mark.parametrize("path", [MODEL_FILE, "README"])
def test_a_dirty_tree_is_refused(hub: GitHub, root: Path, path: str) -> None:
    with (root / path).open("a") as file:
        file.write("# more\n")
    with pytest.raises(UsageError, match=f"the working tree is dirty: {path}"):
        make_work(root).open()
    assert hub.pulls == []
    assert hub.commit(BRANCH) == ""


@pytest.mark.parametrize("how", ["protected", "default"])
def test_a_branch_that_others_build_on_is_no_head(hub: GitHub, root: Path, how: str) -> None:
    if how == "protected":
        git(root, "push", "-q", str(hub.bare), BRANCH)
        hub.protected.add(BRANCH)
    else:
        hub.default_branch = BRANCH
    pushed = hub.commit(BRANCH)
    with pytest.raises(UsageError, match=f"{BRANCH} is a branch that others build on"):
        make_work(root).open()
    assert hub.pulls == []
    assert hub.commit(BRANCH) == pushed


def test_a_checkout_without_remotes_is_refused(hub: GitHub, root: Path) -> None:
    git(root, "remote", "remove", "origin")
    with pytest.raises(UsageError, match="no remote 'origin'"):
        make_work(root)


def test_a_branch_with_nothing_new_is_refused(hub: GitHub, root: Path) -> None:
    git(root, "push", "-q", str(hub.bare), f"{BRANCH}:main", "--force")
    with pytest.raises(OnboardError, match="main has all that"):
        make_work(root).open()


def test_nothing_is_opened_where_the_commit_fails(hub: GitHub, root: Path) -> None:
    work = make_work(root)
    work.prove = failing
    with pytest.raises(OnboardError, match="nothing was opened: .* 1 failed"):
        work.open()
    assert hub.pulls == []
    assert hub.commit(BRANCH) == ""


def failing(commit: str) -> CommitProof:
    proof = passed(commit)
    tests = proof.tests.model_copy(update={"passed": False, "outcome": "1 failed"})
    return proof.model_copy(update={"tests": tests})


def test_a_conflict_is_said_and_changes_nothing(hub: GitHub, root: Path, tmp_path: Path) -> None:
    other_commit(hub, tmp_path, MODEL_FILE, "x = 2\n")
    before = git(root, "rev-parse", BRANCH)
    with pytest.raises(OnboardError, match=f"conflicts with main in {MODEL_FILE}"):
        make_work(root).open()
    assert git(root, "rev-parse", BRANCH) == before
    assert len(git(root, "worktree", "list").splitlines()) == 1


def test_another_model_s_entry_is_no_conflict(hub: GitHub, root: Path, tmp_path: Path) -> None:
    """Both were put at the end of the same list."""
    ours = git(root, "show", f"{BRANCH}:registry/models.yaml")
    theirs = f"{ours}\n".replace("org/tiny", "org/other").replace("tiny", "other")
    other_commit(hub, tmp_path, "registry/models.yaml", theirs)
    make_work(root).open()
    entries = parse_entries(git(root, "show", f"{BRANCH}:registry/models.yaml"))
    assert [entry.name for entry in entries] == ["org/other", "org/tiny"]
    assert git(root, "log", "--format=%s", f"origin/main..{BRANCH}") == "Onboard org/tiny"


def test_a_host_that_is_away_may_be_there_later(hub: GitHub, root: Path) -> None:
    work = make_work(root)
    url = "https://nowhere.invalid/acme/models.git"
    git(root, "remote", "set-url", "origin", url)
    with pytest.raises(UnreachableError, match="git fetch failed"):
        work.open()


def test_an_update_rebases_pushes_and_posts_both_logs_of_that_commit(
    hub: GitHub, root: Path, tmp_path: Path
) -> None:
    work = make_work(root)
    first = work.open().pushed[-1]
    other_commit(hub, tmp_path, "other.txt", "x\n")
    journal, proof = work.update()
    assert proof.commit == journal.pushed[-1] == hub.commit(BRANCH) != first
    assert journal.pushed == [first, proof.commit]
    assert len(hub.texts()) == 3
    assert all(proof.commit in text for text in hub.texts()[1:])
    assert "tests: 1 passed" in hub.texts()[1]
    assert "run: 1 passed" in hub.texts()[2]
    work.update()  # nothing is new
    assert len(hub.texts()) == 3


def test_logs_are_posted_whole_in_numbered_parts(hub: GitHub, root: Path) -> None:
    work = make_work(root)
    log = "".join(f"line {number} ``` of the log\n" for number in range(8000))
    work.prove = lambda commit: passed(commit, log)
    work.open()
    texts = [text for text in hub.texts() if "Log of the run" in text.splitlines()[0]]
    assert len(texts) > 2
    assert all(text.startswith("[AGENT] ") and len(text) <= 65_536 for text in texts)
    heads = [re.search(r"part (\d+) of (\d+)", text) for text in texts]
    assert [(found[1], found[2]) for found in heads if found] == [
        (str(number), str(len(texts))) for number in range(1, len(texts) + 1)
    ]
    joined = "\n".join(texts)
    assert all(f"line {number} ``` of" in joined for number in range(8000))
    assert len({mark_of(text) for text in texts}) == len(texts)


def test_a_long_text_goes_on_in_comments(hub: GitHub, root: Path) -> None:
    work = make_work(root)
    log = "".join(f"test {number} PASSED\n" for number in range(9000))
    work.prove = lambda commit: with_tests(commit, log)
    work.open()
    parts = [hub.pulls[0]["body"], *[text for text in hub.texts() if "Text of this" in text]]
    assert len(parts) > 1
    assert all("test 8999 PASSED" not in part for part in parts[:-1])
    assert "test 8999 PASSED" in parts[-1]


def with_tests(commit: str, log: str) -> CommitProof:
    proof = passed(commit)
    proof.tests.record["output"] = log
    return proof


def test_commits_of_others_on_the_branch_are_not_overwritten(
    hub: GitHub, root: Path, tmp_path: Path
) -> None:
    work = make_work(root)
    work.open()
    theirs = other_commit(hub, tmp_path, "by hand.txt", "x\n", BRANCH)
    with pytest.raises(OnboardError, match="has commits on origin that are not here"):
        work.update()
    assert hub.commit(BRANCH) == theirs


def test_the_journal_that_was_lost_is_found_again(hub: GitHub, root: Path) -> None:
    work = make_work(root)
    first = work.open()
    (work.context.work_dir / "pull_request.json").unlink()
    journal, _ = work.update()
    assert (journal.number, journal.pushed) == (first.number, first.pushed)
    assert len(hub.texts()) == 1


def test_a_branch_that_is_checked_out_moves_with_its_files(
    hub: GitHub, root: Path, tmp_path: Path
) -> None:
    git(root, "checkout", "-q", "-f", BRANCH)
    other_commit(hub, tmp_path, "other.txt", "x\n")
    make_work(root).open()
    assert (root / "other.txt").read_text() == "x\n"
    assert git(root, "status", "--porcelain", "--untracked-files=no") == ""
    assert git(root, "rev-parse", "HEAD") == hub.commit(BRANCH)


def test_a_fork_is_pushed_to_and_the_upstream_asked(
    hub: GitHub, root: Path, tmp_path: Path
) -> None:
    fork = tmp_path / "fork.git"
    git(tmp_path, "clone", "-q", "--bare", str(hub.bare), str(fork))
    address = "git@github.test:me/models.git"
    git(root, "remote", "rename", "origin", "upstream")
    git(root, "remote", "add", "origin", address)
    git(root, "config", f"url.{fork}.insteadOf", address)
    work = make_work(root)
    assert work.label == f"me:{BRANCH}"
    assert work.forge.name == NAME
    work.branch.rebase()
    work.branch.push(frozenset())
    assert git(fork, "rev-parse", BRANCH) == work.branch.tip
    assert hub.commit(BRANCH) == ""


@pytest.mark.parametrize("after", [False, True])
def test_an_answer_that_was_lost_opens_and_posts_once(hub: GitHub, root: Path, after: bool) -> None:
    hub.faults = [
        Fault("POST", r"/pulls$", after=after),
        Fault("POST", r"/comments$", after=after),
        Fault("POST", r"/comments$", status=502, after=after, skip=1),
    ]
    work = make_work(root)
    work.forge.ask = quick(work)  # type: ignore[method-assign]
    work.open()
    assert len(hub.pulls) == 1
    assert len(hub.texts()) == 1


def quick(work):
    from onboard.pull_request.forge.patience import patiently

    return lambda call: patiently(call, work.forge.tell, sleep=lambda _: None)


def test_the_token_is_nowhere(hub: GitHub, root: Path) -> None:
    said: list[str] = []
    work = make_work(root, said)
    work.prove = lambda commit: passed(commit, f"a log with {TOKEN} in it\n")
    work.open()
    assert "GH_TOKEN" not in os.environ
    assert all(request.authorization for request in hub.requests)
    files = [path for path in root.rglob("*") if path.is_file() and path.name != "x"]
    kept = [path for path in files if TOKEN.encode() in path.read_bytes()]
    assert kept == []
    assert TOKEN not in "".join([*hub.texts(), *said, repr(work)])
    assert PullJournal.load(work.context.work_dir) is not None
