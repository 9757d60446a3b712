"""The whole road with its real phases: undisturbed, killed, two at once, from a Hub and from the
cache.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from onboard.workflow.phases import PHASES
from tests.support.checkpoints import edit_config, save_checkpoint, tree
from tests.support.hub_server import HubServer, Repository
from tests.support.markdown import html, live, tokens
from tests.support.warm import Warm, started

pytestmark = pytest.mark.slow

# What differs between any two runs: times, seeds, and the texts that show them.
VARYING = (
    *(
        "state.json",
        "worklog.md",
        "worklog.jsonl",
        "agents.json",
        "tests.json",
        "run.json",
        "report.md",
        "report.html",
        "pull_request.md",
    ),
    "results.jsonl",
)
STAMP = re.compile(r"_\d{8}-\d{6}_")
# A name and config values that break out of whatever they are pasted into unescaped.
PLACE = re.compile(r"(?:^|[ (])([\w./-]+\.(?:py|yaml|md|ipynb|log)):(\d+)(?:-(\d+))?")
ROOT = Path(__file__).resolve().parents[2]
INJECTION = "x'\"\"\"); open('pwned', 'w') #{{7*7}}<script>"
FOLDER = "tiny'\"\"\"); open('pwned', 'w') #{{7*7}}<i>"


def command(model: str | Path, root: Path, *options: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "onboard",
        str(model),
        "--root",
        str(root),
        "--device",
        "cpu",
        "--json",
        *options,
    ]


def start(arguments: list[str], **environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run_warm(warm: Warm, arguments: list[str]) -> dict[str, Any]:
    """Run a command to its end without its imports; return the document that it prints."""
    done = warm(*arguments[2:])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    return json.loads(stdout)  # type: ignore[no-any-return]


def stable_tree(root: Path) -> dict[str, str]:
    """The tree with logs under a name without time, and without the content of what shows times and
    seeds.
    """
    found = {}
    for name, digest in tree(root).items():
        varies = Path(name).name in VARYING or name.endswith(".log")
        found[STAMP.sub("_", name)] = "" if varies else digest
    return found


@dataclass
class Finished:
    """A checkpoint that was onboarded, where, and the document that the command printed."""

    checkpoint: Path
    root: Path
    document: dict[str, Any]
    seconds: float


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A checkpoint whose name and config try to inject code, onboarded undisturbed."""
    folder = tmp_path_factory.mktemp("hostile")
    checkpoint = save_checkpoint(folder / FOLDER)
    edit_config(checkpoint, _name_or_path=INJECTION, transformers_version=INJECTION)
    edit_config(checkpoint, **{INJECTION: INJECTION, "task_specific_params": {INJECTION: 1}})
    began = time.monotonic()
    document = finish(start(command(checkpoint, folder / "root")))
    return Finished(checkpoint, folder / "root", document, time.monotonic() - began)


def test_every_phase_is_done(hostile: Finished) -> None:
    assert hostile.document["status"] == "done"
    assert [(phase["name"], phase["status"]) for phase in hostile.document["phases"]] == [
        (n, "done") for n in PHASES
    ]
    for path in hostile.document["artifacts"].values():
        assert Path(path).is_file()
        assert Path(path).is_relative_to(hostile.root)


def test_a_second_run_skips_everything_and_changes_nothing(hostile: Finished, warm: Warm) -> None:
    before = tree(hostile.root)
    document = run_warm(warm, command(hostile.checkpoint, hostile.root))
    assert {phase["status"] for phase in document["phases"]} == {"skipped"}
    assert document["artifacts"] == hostile.document["artifacts"]
    assert tree(hostile.root) == before


def test_the_text_of_the_pull_request_points_at_lines_that_are_there(hostile: Finished) -> None:
    """In the root, in this package, in transformers; and nothing of the config is live in it."""
    text = Path(hostile.document["artifacts"]["pull_request"]).read_text(encoding="utf-8")
    transformers = find_spec("transformers")
    assert transformers is not None
    folders = (hostile.root, ROOT, Path(transformers.origin or "").parents[1])
    spans = [token.content for token in tokens(text) if token.type == "code_inline"]
    named = [found for span in spans for found in PLACE.findall(span)]
    assert len(named) > 60
    for name, first, last in named:
        paths = [folder / name for folder in folders if (folder / name).is_file()]
        assert paths or name == "modeling_llama.py", name
        for path in paths[:1]:
            count = len(path.read_text(encoding="utf-8").splitlines())
            assert 1 <= int(first) <= int(last or first) <= count, (name, first, last)
    assert not live(text.removeprefix("[AGENT]"))
    closed = re.findall(r"^- \[ \] (.*)$", text.split("## Files")[0], re.MULTILINE)
    assert sorted(closed) == sorted(
        [
            "Every statement is about one commit",
            "That commit is on top of the target branch",
            "Tests and run were made with the files of that commit",
        ]
    ), "a root that is no checkout has no commit; the rest is shown"


def test_it_is_explained_and_nothing_of_its_name_is_live(hostile: Finished, warm: Warm) -> None:
    words = ("explain", hostile.checkpoint, "--root", hostile.root, "--gpu", "H100")
    page = warm("onboard", *words).stdout
    assert "### Layers 0-1: `full_attention`" in page
    assert re.search(r"insert_cached_attention`: 2 matches, nodes \d+ -> \d+", page)
    assert "µs a token at least" in page
    assert not live(page)
    assert html(page) <= {"<!-- -->"}


def test_nothing_was_injected(hostile: Finished) -> None:
    assert not list(hostile.root.rglob("pwned"))
    assert not Path("pwned").exists()
    for path in hostile.root.rglob("*.py"):
        calls = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        ]
        assert not [
            call
            for call in calls
            if isinstance(call.func, ast.Name) and call.func.id in ("open", "exec", "eval")
        ]
    for path in hostile.root.rglob("*.html"):
        text = path.read_text()
        assert "<script>" not in text
        assert "<i>" not in text
    without_stamps = [
        re.sub(r"\d{8}-\d{6}", "", Path(path).name)
        for path in hostile.document["artifacts"].values()
    ]
    assert all("49" not in name for name in without_stamps)


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.exhaustive)])
def test_killed_at_random_moments(
    kills: int, hostile: Finished, warm: Warm, tmp_path: Path
) -> None:
    """Each run goes on where the one before was killed; a root that gets done is followed by a new
    one.
    """
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    moments, killed, roots = random.Random(seed), 0, [tmp_path / "root0"]
    while killed < kills:
        process = start(command(hostile.checkpoint, roots[-1]))
        try:
            process.communicate(timeout=moments.uniform(0.1, hostile.seconds / 3))
            roots.append(tmp_path / f"root{len(roots)}")
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            killed += 1
    run_warm(warm, command(hostile.checkpoint, roots[-1]))
    for root in roots:
        assert stable_tree(root) == stable_tree(hostile.root)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """A model, one of another size that shares its file, and one that has another architecture."""
    folder = tmp_path_factory.mktemp("hub")
    one = save_checkpoint(folder / "one", attention_bias=True, tie_word_embeddings=True)
    two = save_checkpoint(
        folder / "two", attention_bias=True, tie_word_embeddings=True, intermediate_size=200
    )
    other = save_checkpoint(folder / "other", "qwen2")
    names = {"acme/tiny-1b": one, "acme/tiny-2b": two, "acme/other-1b": other}
    with HubServer({name: Repository(path) for name, path in names.items()}) as server:
        yield server


def test_a_folder_and_an_id_at_once_then_offline(
    hostile: Finished, hub: HubServer, tmp_path: Path
) -> None:
    """Two models of one family share a root, and nothing of either is lost."""
    root, cache = tmp_path / "root", str(tmp_path / "hf")
    online = {"HF_ENDPOINT": hub.url, "HF_HOME": cache}
    # The libraries read the environment as they are imported
    with started(**online) as warm, ThreadPoolExecutor() as threads:
        both = [command("acme/tiny-1b", root), command(hostile.checkpoint, root)]
        documents = list(threads.map(partial(run_warm, warm), both))
    for document in documents:
        assert [phase["status"] for phase in document["phases"]] == ["done"] * len(PHASES)
    registry = (root / "registry" / "models.yaml").read_text()
    assert registry.count("- name:") == 3  # and a model of the family, which nobody has run
    assert registry.count("acme/tiny-1b") == registry.count("acme/tiny-2b") == 1
    survey = json.loads((root / ".onboard" / "acme--tiny-1b" / "survey.json").read_text())
    assert survey["siblings"] == ["acme/tiny-2b"]
    assert hub.downloads() >= {"config.json", "tokenizer.json", "model.safetensors"}
    hub.requests.clear()
    offline = finish(
        start(
            command("acme/tiny-1b", root, "--offline", "--fresh", "--until", "generate"), **online
        )
    )
    assert [phase["status"] for phase in offline["phases"]] == ["done"] * 4
    assert hub.requests == []
