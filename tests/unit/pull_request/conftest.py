from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.github import TOKEN, GitHub, serving
from tests.support.pull_requests import (
    PullRequestWork,
    make_remote,
    make_root,
    make_work,
    use_remote,
    without_home,
)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare repository and a root, made once."""
    folder = tmp_path_factory.mktemp("prepared")
    make_root(folder, make_remote(folder))
    return folder


@pytest.fixture
def hub(tmp_path: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GitHub]:
    bare = tmp_path / "bare.git"
    shutil.copytree(prepared / "bare.git", bare)
    with serving(bare) as hub:
        without_home(monkeypatch, hub.url, TOKEN, tmp_path / "gh")
        yield hub


@pytest.fixture
def root(tmp_path: Path, prepared: Path, hub: GitHub) -> Path:
    root = tmp_path / "root"
    shutil.copytree(prepared / "root", root)
    use_remote(root, hub.bare)
    return root


@pytest.fixture
def opened(root: Path) -> PullRequestWork:
    """The pull request is open."""
    work = make_work(root)
    work.open()
    return work
