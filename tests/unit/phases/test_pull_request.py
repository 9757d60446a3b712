from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from onboard.analysis.spec import RepositoryCode
from onboard.registry import parse_entries
from onboard.workflow.phases.pull_request import PullRequest
from tests.support.phases import ContextFactory, onboarded


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


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
    context = onboarded(context_for("org/tiny"))
    result = PullRequest().run(context)
    assert "not a git checkout" in result.summary
    text = context.artifact("pull_request.md").read_text()
    assert "```text\nHow big is the <universe>? & `why`\n```" in text
    assert "```text\n Very | big\n<b>indeed</b>\n```" in text
    assert "```text\n1 passed\n```" in text
    assert "python -m pytest t.py" in text
    assert "- [x] Held-out text is as likely" in text
    assert "- [x] S1: no repeats (style, noted)\n  - `models/m.py:7: a | b`" in text
    assert "- Not applicable: CUDA graphs are used\n  - `the run was on a CPU`" in text


def test_code_that_was_trusted_is_named_with_what_repeats_it_elsewhere(
    context_for: ContextFactory,
) -> None:
    files = {"modeling_b.py": "ab12", "configuration_a.py": "cd34"}
    repository = RepositoryCode(classes={}, files=files, facts=[], native={})
    context = onboarded(context_for("org/tiny", repository=repository, revision="0123abc"))
    PullRequest().run(context)
    text = context.artifact("pull_request.md").read_text()
    section = text.split("## Code that the model brings\n")[1].split("\n## ")[0]
    assert "trusted" in section
    assert "from the repository `org/tiny` at revision `0123abc`" in section
    assert "hf download org/tiny --revision 0123abc modeling_b.py configuration_a.py\n" in section
    assert all(f"- `{name}` (sha256 `{digest}`)" in section for name, digest in files.items())
    assert "onboard org/tiny --root . --trust-remote-code --until test\n" in section
    assert "`.onboard/tiny/code`" in section
    PullRequest().run(onboarded(context_for("org/plain")))
    assert "trust" not in (context.root / ".onboard" / "plain" / "pull_request.md").read_text()


def test_the_branch_has_the_models_own_files_and_lines(
    context_for: ContextFactory, checkout: Path
) -> None:
    onboarded(context_for("org/other", architecture="Qwen2ForCausalLM"))
    context = onboarded(context_for("org/tiny"))
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
    context = onboarded(context_for("org/tiny"))
    PullRequest().run(context)
    assert "unchanged" in PullRequest().run(context).summary
    (checkout / "models" / "modeling_llama.py").write_text("x = 2\n")
    assert "updated" in PullRequest().run(context).summary
    assert len(_git(checkout, "log", "--format=%H", "onboard/tiny").split()) == 3


def test_other_entries_of_the_branch_survive(context_for: ContextFactory, checkout: Path) -> None:
    other = onboarded(context_for("org/other", architecture="Qwen2ForCausalLM"))
    _git(checkout, "add", "-A")
    _git(checkout, "-c", "user.name=A", "-c", "user.email=a@b.c", "commit", "-q", "-m", "other")
    context = onboarded(context_for("org/tiny"))
    PullRequest().run(context)
    changed = _git(checkout, "diff", "main", "onboard/tiny", "--", "registry/models.yaml")
    assert not [
        line for line in changed.splitlines() if line.startswith("-") and not line.startswith("---")
    ]
    text = _git(checkout, "show", "onboard/tiny:registry/models.yaml")
    assert [entry.name for entry in parse_entries(text)] == ["org/other", "org/tiny"]
    assert other.root == checkout
