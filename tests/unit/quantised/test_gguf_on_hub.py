"""GGUF files of a Hub's repositories: the only one, one that is named, and one that is not there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import quantised
from tests.support.hub_server import HubServer, Repository

pytest.importorskip("gguf", reason='the extra "gguf" is not installed')

ASK = """
import sys
from onboard.errors import OnboardError
from onboard.hub import open_source
try:
    folder = open_source(sys.argv[1]).weights()
    print(sorted(path.name for path in folder.iterdir()), (folder / "model.gguf").stat().st_size)
except OnboardError as error:
    print("refused:", error)
"""


def asked(model: str, hub: HubServer, home: Path) -> str:
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home / "hf"),
        "ONBOARD_CACHE": str(home / "cache"),
    }
    command = [sys.executable, "-c", ASK, model]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_files_of_repositories(tmp_path: Path) -> None:
    source = quantised.FOLDER / "gguf_q8_0" / "model.gguf"
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, names in ((one, ["tiny.Q8_0.gguf"]), (two, ["a.gguf", "b.gguf"])):
        folder.mkdir()
        for name in names:
            shutil.copyfile(source, folder / name)
    repositories = {"acme/one": Repository(one), "acme/two": Repository(two)}
    with HubServer(repositories) as hub:
        found = asked("acme/one", hub, tmp_path)
        assert "config.json" in found
        assert str(source.stat().st_size) in found
        several = asked("acme/two", hub, tmp_path)
        assert "2 GGUF files: a.gguf, b.gguf" in several
        assert "acme/two/a.gguf" in several
        hub.requests.clear()
        assert "config.json" in asked("acme/two/b.gguf", hub, tmp_path)
        assert {name for name in hub.downloads() if name.endswith("gguf")} == {"b.gguf"}
        assert "no file c.gguf" in asked("acme/two/c.gguf", hub, tmp_path)
