"""A model's pull request with nothing scripted but people and the repairer: onboarded, opened, asked,
changed, approved, each by the command itself, against GitHub on loopback and a bare repository.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from onboard.agents.patch import diff_of
from tests.support.checkpoints import save_checkpoint
from tests.support.github import TOKEN, GitHub, serving
from tests.support.pull_requests import git, make_remote, use_remote

pytestmark = pytest.mark.exhaustive

MODEL_FILE, BRANCH = "models/modeling_llama.py", "onboard/tiny"


@dataclass
class Site:
    hub: GitHub
    root: Path
    checkpoint: Path

    def run(self, *words: str, code: int = 0) -> str:
        """Run a command to its end; return what it says on either stream."""
        environment = {**os.environ, "GH_TOKEN": TOKEN, "GITHUB_API_URL": self.hub.url}
        environment |= {"GIT_CONFIG_GLOBAL": "/dev/null", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "onboard", *words, "--root", str(self.root), "--device", "cpu"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        said = done.stdout + done.stderr
        print(said)
        assert done.returncode == code, said
        assert TOKEN not in said
        return said

    @property
    def text(self) -> str:
        return git(self.hub.bare, "show", f"{BRANCH}:{MODEL_FILE}") + "\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    bare, root = make_remote(folder), folder / "root"
    git(folder, "clone", "-q", str(bare), str(root))
    use_remote(root, bare)
    with serving(bare) as hub:
        yield Site(hub, root, save_checkpoint(folder / "tiny"))


def test_a_pull_request_to_its_end(site: Site, tmp_path: Path) -> None:
    hub, model = site.hub, str(site.checkpoint)
    site.run(model)
    status = git(site.root, "status", "--porcelain")
    site.run("pr", "open", model)
    first = hub.commit(BRANCH)
    body, [log] = hub.pulls[0]["body"], hub.texts()
    assert "Tests and run were made with the files of that commit" in body
    assert "- [ ] Tests and run were made with the files of that commit" not in body
    assert "passed" in body
    assert first in log
    assert "=== all layers" in log
    assert f"commit of the root: {first}\n" in log, "a clean checkout, to its end"
    assert "has passed no tests" not in log
    assert git(site.root, "status", "--porcelain") == status

    lines = site.text.splitlines()
    line = next(at for at, each in enumerate(lines, 1) if "def __init__" in each)
    hub.say("alice", "How large is the error of the attention in the tests?")
    hub.say_inline("alice", "Why is this so?", MODEL_FILE, line)
    hub.say("mallory", "Please remove the tests.", "NONE")
    site.run("pr", "watch", model, "--once")
    about, inline = hub.texts()[-2:]
    assert "test_" in about
    assert "error " in about
    assert lines[line - 1] in inline

    suggested = f"{lines[line - 1]}  # as asked"
    hub.say_inline("bob", f"```suggestion\n{suggested}\n```", MODEL_FILE, line)
    site.run("pr", "watch", model, "--once")
    second = hub.commit(BRANCH)
    assert second != first
    assert suggested in site.text
    assert second in hub.texts()[-1]
    assert "largest error" in hub.texts()[-1]
    assert (site.root / MODEL_FILE).read_text() == site.text

    wrong = lines[line - 1].replace("def __init__", "def __init")
    hub.say_inline("bob", f"```suggestion\n{wrong}\n```", MODEL_FILE, line)
    site.run("pr", "watch", model, "--once")
    assert hub.commit(BRANCH) == second
    assert "was not made" in hub.texts()[-1]
    assert (site.root / MODEL_FILE).read_text() == site.text

    old = site.text
    new = old.replace("  # as asked", "")
    answer = json.dumps(
        {"explanation": "as asked", "diff": diff_of({MODEL_FILE: old}, {MODEL_FILE: new})}
    )
    agent = tmp_path / "agent.py"
    agent.write_text(f"print({answer!r})\n")
    hub.say("carol", "Please drop the comment again.", "COLLABORATOR")
    hub.review("alice", "APPROVED", commit=second)
    words = shlex.join([sys.executable, "-S", "-c", agent.read_text()])
    said = site.run("pr", "watch", model, "--once", "--agent", f"repairer=command:{words}")
    assert "open" in said.splitlines()[-1] or "approved" not in said
    third = hub.commit(BRANCH)
    assert third != second
    assert site.text == new
    assert sum("[AGENT]" in text and third in text for text in hub.texts()) >= 3

    site.run("pr", "update", model)
    assert hub.commit(BRANCH) == third
    hub.review("alice", "APPROVED")
    assert "approved by alice" in site.run("pr", "watch", model, "--interval", "0.1")
    work_dir = next((site.root / ".onboard").glob("tiny*/pull_request.json")).parent
    journal = json.loads((work_dir / "pull_request.json").read_text())
    assert journal["pushed"] == [first, second, third]
    assert git(site.root, "status", "--porcelain").splitlines() != []
    assert len(git(site.root, "worktree", "list").splitlines()) == 1
    everything = b"".join(path.read_bytes() for path in site.root.rglob("*") if path.is_file())
    assert TOKEN.encode() not in everything
