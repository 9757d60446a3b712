"""A model that was onboarded in a checkout whose remotes are bare repositories, and what works on its
pull request, scripted.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from onboard.pull_request.cycle import PullRequestWork
from onboard.pull_request.forge.github_api import Pull
from onboard.pull_request.forge.remarks import Said
from onboard.pull_request.opened_work import Place, open_work
from onboard.pull_request.pull_journal import Change, PullJournal
from onboard.pull_request.pushed_proof import CommitLog, CommitProof
from onboard.workflow.files import write_atomically
from onboard.workflow.phase import RunOptions
from onboard.workflow.phase_runner import open_run
from onboard.workflow.phases.pull_request import PullRequest
from tests.support.github import NAME
from tests.support.phases import FolderSource, make_run, make_spec, onboarded

MODEL, BRANCH = "org/tiny", "onboard/tiny"
MODEL_FILE, TEST_FILE = "models/modeling_llama.py", "tests/equivalence/test_llama_modeling.py"
ADDRESS = f"https://github.test/{NAME}.git"
TEXT = "class LlamaMLP:\n    scale = 1\n\n\nclass LlamaModel:\n    layers = 2\n"


def git(folder: Path, *words: str) -> str:
    """Run git; return what it prints."""
    who = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    done = subprocess.run(
        ["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def make_remote(folder: Path) -> Path:
    """Return a bare repository with one commit on main."""
    bare, first = folder / "bare.git", folder / "first"
    git(folder, "init", "-q", "--bare", "-b", "main", str(bare))
    git(folder, "init", "-q", "-b", "main", str(first))
    (first / ".gitignore").write_text(".onboard/\n")
    (first / "README").write_text("models\n")
    git(first, "add", "-A")
    git(first, "commit", "-q", "-m", "start")
    git(first, "push", "-q", str(bare), "main")
    return bare


def make_root(folder: Path, bare: Path) -> Path:
    """Return a clone in which the model was onboarded: its files in the tree, its branch, its work
    folder.
    """
    root = folder / "root"
    git(folder, "clone", "-q", str(bare), str(root))
    use_remote(root, bare)
    context = open_run(MODEL, root, RunOptions(device="cpu"))
    spec = make_spec(MODEL)
    context = replace(context, source=cast(Any, FolderSource(root, spec.config)))
    context.work_dir.mkdir(parents=True)
    spec.save(context.artifact("spec.yaml"))
    for path, text in {MODEL_FILE: TEXT, TEST_FILE: "def test_it():\n    pass\n"}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    onboarded(context)
    (root / MODEL_FILE).write_text(TEXT)
    PullRequest().run(context)
    return root


def use_remote(root: Path, bare: Path) -> None:
    """Have a clone's origin be at GitHub, by its address, and in truth a bare repository."""
    git(root, "remote", "set-url", "origin", ADDRESS)
    config = root / ".git" / "config"
    lines = config.read_text().partition('[url "')[0]
    config.write_text(f'{lines}[url "{bare}"]\n\tinsteadOf = {ADDRESS}\n')


def passed(commit: str, log: str = "1 passed\n") -> CommitProof:
    """A proof as of a commit whose tests pass."""
    tests = {
        "command": "python -m pytest t.py",
        "output": f"tests: {log}",
        "tests": [],
        "files": {},
    }
    return CommitProof(
        commit=commit,
        tests=CommitLog(title="Unit tests", passed=True, outcome="well", log=log, record=tests),
        run=CommitLog(
            title="End-to-end run",
            passed=True,
            outcome="well",
            log=f"run: {log}",
            record=make_run(),
        ),
    )


def make_work(root: Path, said: list[str] | None = None) -> PullRequestWork:
    """What works on the model's pull request; tests and run of a commit are scripted and kept."""
    told = [] if said is None else said
    work = open_work(MODEL, root, RunOptions(device="cpu"), Place(pause=0.0), told.append)
    work.prove = lambda commit: _kept(work, commit)
    return work


def _kept(work: PullRequestWork, commit: str) -> CommitProof:
    path = work.context.work_dir / "pushed" / commit
    if not path.exists():
        write_atomically(path, "proven\n")
    return passed(commit)


@dataclass
class ScriptedHands:
    """Answers from a line, and changes by putting a line at the end of the model file."""

    work: PullRequestWork
    asked: list[str] = field(default_factory=list)

    def answer(self, said: Said) -> str:
        self.asked.append(said.key)
        return "" if "weather" in said.body else "It is 8."

    def propose(self, said: Said) -> Change:
        self.asked.append(said.key)
        old = (self.work.context.root / MODEL_FILE).read_text()
        new = f"{old}# {said.key}\n"
        return Change(
            diff=f"+# {said.key}",
            files={MODEL_FILE: new},
            replaces={},
            before="1e-7",
            after="2e-7",
        )

    def commit(self, change: Change) -> None:
        for path, text in change.files.items():
            write_atomically(self.work.context.root / path, text)
        self.work.branch.checkout.commit(BRANCH, change.files, "Change")

    def push(self, pull: Pull, journal: PullJournal, change: str) -> CommitProof:
        return self.work.pushed(pull, journal, change)


def without_home(monkeypatch: Any, url: str, token: str, folder: Path) -> None:
    """The environment in which GitHub is the stand-in, and the user has no other settings."""
    for name in ("GITHUB_TOKEN", "GH_ENTERPRISE_TOKEN", "GITHUB_ENTERPRISE_TOKEN", "GH_HOST"):
        monkeypatch.delenv(name, raising=False)
    values = {"GH_TOKEN": token, "GITHUB_API_URL": url, "GH_CONFIG_DIR": str(folder)}
    values |= {"GIT_CONFIG_GLOBAL": "/dev/null", "NO_PROXY": "127.0.0.1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
