from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from onboard.analysis.spec import RepositoryCode
from onboard.registry import parse_entries
from onboard.workflow.phase import RunContext
from onboard.workflow.phases.cookbook import Cookbook
from onboard.workflow.phases.matrix import Matrix
from onboard.workflow.phases.pull_request import PullRequest
from onboard.workflow.phases.register import Register
from tests.support.phases import ContextFactory, make_run


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def _onboarded(context: RunContext, **run: Any) -> RunContext:
    Register().run(context)
    test = {"name": "test_mlp", "level": "block", "block": "mlp", "status": "passed", "message": ""}
    context.write_json(
        "tests.json", {"command": "python -m pytest t.py", "output": "1 passed\n", "tests": [test]}
    )
    items = [
        {
            "id": "C1",
            "title": "canonical ops",
            "kind": "contract",
            "verdict": "PASS",
            "evidence": [],
        },
        {
            "id": "S1",
            "title": "no repeats",
            "kind": "style",
            "verdict": "NOTE",
            "evidence": ["models/m.py:7: a | b"],
        },
    ]
    context.write_json("review.json", {"verdict": "PASS", "notes": 1, "items": items})
    context.write_json("run.json", make_run(**run))
    (context.root / "models").mkdir(exist_ok=True)
    (context.root / "models" / "modeling_llama.py").write_text("x = 1\n")
    Matrix().run(context)
    Cookbook().run(context)
    return context


@pytest.fixture
def checkout(context_for: ContextFactory, tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    _git(root, "init", "-q", "-b", "main")
    (root / ".gitignore").write_text(".onboard/\n")
    _git(
        root,
        "-c",
        "user.name=A",
        "-c",
        "user.email=a@b.c",
        "commit",
        "-q",
        "--allow-empty",
        "-m",
        "start",
    )
    return root


def test_the_text_has_everything_verbatim(context_for: ContextFactory) -> None:
    context = _onboarded(context_for("org/tiny"))
    result = PullRequest().run(context)
    assert "not a git checkout" in result.summary
    text = context.artifact("pull_request.md").read_text()
    assert "```text\nHow big is the <universe>? & `why`\n```" in text
    assert "```text\n Very | big\n<b>indeed</b>\n```" in text
    assert "```text\n1 passed\n```" in text
    assert "python -m pytest t.py" in text
    assert "- [x] text equal" in text
    assert "- [x] S1: no repeats (style, noted)\n  - `models/m.py:7: a | b`" in text
    assert "- [ ] CUDA graphs not used" in text


def test_code_that_was_trusted_is_named_with_what_repeats_it_elsewhere(
    context_for: ContextFactory,
) -> None:
    files = {"modeling_b.py": "ab12", "configuration_a.py": "cd34"}
    repository = RepositoryCode(classes={}, files=files, facts=[], native={})
    context = _onboarded(context_for("org/tiny", repository=repository, revision="0123abc"))
    PullRequest().run(context)
    text = context.artifact("pull_request.md").read_text()
    section = text.split("## Code that the model brings\n")[1].split("## Tests")[0]
    assert "trusted" in section
    assert all(f"- `{name}` (sha256 `{digest}`)" in section for name, digest in files.items())
    assert "onboard org/tiny --root . --trust-remote-code --until test\n" in section
    assert "`.onboard/tiny/code`" in section
    PullRequest().run(_onboarded(context_for("org/plain")))
    assert "trust" not in (context.root / ".onboard" / "plain" / "pull_request.md").read_text()


def test_the_branch_has_the_models_own_files_and_lines(
    context_for: ContextFactory, checkout: Path
) -> None:
    _onboarded(context_for("org/other", architecture="Qwen2ForCausalLM"))
    context = _onboarded(context_for("org/tiny"))
    before = _git(checkout, "status", "--porcelain")
    result = PullRequest().run(context)
    assert result.summary.startswith("branch onboard/tiny created")
    assert _git(checkout, "status", "--porcelain") == before
    assert _git(checkout, "diff", "--name-only", "main", "onboard/tiny").split() == [
        "cookbooks/tiny_cookbook.ipynb",
        "models/modeling_llama.py",
        "registry/configs/tiny.yaml",
        "registry/models.yaml",
        "registry/supported_models.md",
    ]
    entries = parse_entries(_git(checkout, "show", "onboard/tiny:registry/models.yaml"))
    assert [entry.name for entry in entries] == ["org/tiny"]
    matrix = _git(checkout, "show", "onboard/tiny:registry/supported_models.md")
    assert "org/tiny" in matrix
    assert "org/other" not in matrix


def test_a_rerun_commits_only_what_changed(context_for: ContextFactory, checkout: Path) -> None:
    context = _onboarded(context_for("org/tiny"))
    PullRequest().run(context)
    assert "unchanged" in PullRequest().run(context).summary
    (checkout / "models" / "modeling_llama.py").write_text("x = 2\n")
    assert "updated" in PullRequest().run(context).summary
    assert len(_git(checkout, "log", "--format=%H", "onboard/tiny").split()) == 3


def test_other_entries_of_the_branch_survive(context_for: ContextFactory, checkout: Path) -> None:
    other = _onboarded(context_for("org/other", architecture="Qwen2ForCausalLM"))
    _git(checkout, "add", "-A")
    _git(checkout, "-c", "user.name=A", "-c", "user.email=a@b.c", "commit", "-q", "-m", "other")
    context = _onboarded(context_for("org/tiny"))
    PullRequest().run(context)
    changed = _git(checkout, "diff", "main", "onboard/tiny", "--", "registry/models.yaml")
    assert not [
        line for line in changed.splitlines() if line.startswith("-") and not line.startswith("---")
    ]
    text = _git(checkout, "show", "onboard/tiny:registry/models.yaml")
    assert [entry.name for entry in parse_entries(text)] == ["org/other", "org/tiny"]
    assert other.root == checkout
