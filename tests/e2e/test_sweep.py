"""`onboard sweep`: from the command line to the coverage, and a tool that is wrong gets no pass."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from onboard.content import CONTENT_ROOT
from onboard.workflow.phases import PHASES
from onboard.workflow.sweep.store import RECORD
from onboard.workflow.sweep.target_record import LEVELS, TESTED, TargetRecord, conclude
from tests.support.warm import Warm

SWEEP = [sys.executable, "-m", "onboard", "sweep", "--device", "cpu", "--jobs", "1"]


def sweep(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SWEEP, "--root", str(root), *words], capture_output=True, text=True, timeout=600
    )


def by_name(document: dict[str, Any]) -> dict[str, Any]:
    return {entry["type"]: entry for entry in document["entries"] if entry["variant"] == "default"}


def comparable(entry: dict[str, Any]) -> dict[str, Any]:
    """What two runs have in common: weights and prompts, and so the errors, are other ones each
    time.
    """
    assert all(0 <= error <= 1e-5 for error in entry["errors"].values())
    return {
        key: value
        for key, value in entry.items()
        if key not in ("seconds", "cpu_seconds", "errors", "verdict")
    }


def left_by(target: str, root: Path) -> set[str]:
    folder = root / ".onboard" / "sweep" / target / "root"
    left = {
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".log"
    }
    # Logs and commits have the time in their names
    return {path.as_posix() for path in left if path.parts[0] != ".git"}


SAMPLE = (
    "bart",
    "roberta",
    "bloom",
    "gpt_neo",
    "mamba2",
    "lfm2",
    "gemma3",
    "llama4_text",
    "deepseek_v32",
    "phi3",
)
"""One type for each mechanism that no other test brings through the whole road."""
DRAWN = 1
"""So many of them are swept in one run of the tests: the whole sweep is a command of its own."""


@dataclass
class Swept:
    """What was swept, where, and what was found."""

    names: list[str]
    root: Path
    entries: dict[str, Any]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """A type that works, one that is no causal language model, and a sample."""
    names, root = (
        ["llama", "cpmant", *random.sample(SAMPLE, DRAWN)],
        tmp_path_factory.mktemp("swept"),
    )
    print(names)
    done = sweep(root, *names, "--json")
    assert done.returncode == 0, done.stderr
    return Swept(names, root, by_name(json.loads(done.stdout)))


@pytest.mark.slow
def test_a_sweep_finds_what_works_and_goes_on_where_it_was(
    swept: Swept, warm: Warm, tmp_path: Path
) -> None:
    llama = swept.entries["llama"]
    assert (llama["status"], llama["level"], llama["reason"]) == ("pass", "cached_decode", "")
    assert llama["phases"] == dict.fromkeys(PHASES, "done")
    assert llama["exit_code"] == 0
    assert llama["verdict"]["tokens"] > 0
    assert 0 <= llama["verdict"]["prefill_error"] <= 1e-5
    assert set(llama["levels"]) == set(LEVELS)
    assert set(llama["errors"]) == set(TESTED)
    assert all(0 <= error <= 1e-5 for error in llama["errors"].values())
    assert 100 < llama["lines"] < 260
    # Its first tokens see the whole prompt
    assert swept.entries["cpmant"]["status"] == "not-causal"
    assert not (swept.root / "registry").exists()  # a few types are no coverage

    again = warm(*SWEEP[2:], "--root", swept.root, *swept.names, "--json")
    assert by_name(json.loads(again.stdout)) == swept.entries
    assert again.stderr.count("unchanged") == len(swept.names)

    # A Ray cluster of this machine finds the same, and brings it here.
    two = swept.names[:2]
    done = sweep(tmp_path / "ray", *two, "--json", "--executor", "ray", "--jobs", "2")
    assert done.returncode == 0, done.stderr
    spread = by_name(json.loads(done.stdout))
    assert {name: comparable(entry) for name, entry in spread.items()} == {
        name: comparable(swept.entries[name]) for name in two
    }
    assert left_by("llama", tmp_path / "ray") == left_by("llama", swept.root)


@pytest.mark.slow
def test_a_sample_is_as_the_committed_coverage_says(swept: Swept) -> None:
    committed = by_name(
        json.loads((CONTENT_ROOT / "registry" / "coverage.json").read_text(encoding="utf-8"))
    )
    sample = swept.names[2:]
    for key in ("status", "level", "phases"):
        assert {name: swept.entries[name][key] for name in sample} == {
            name: committed[name][key] for name in sample
        }


@pytest.mark.exhaustive
def test_an_interrupt_leaves_what_was_found_and_no_process(tmp_path: Path) -> None:
    command = [*SWEEP, "--root", str(tmp_path), "--all-transformers", "--limit-seconds", "60"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("[1/")
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    coverage = json.loads((tmp_path / "registry" / "coverage.json").read_text())
    assert 1 <= len(coverage["entries"]) < coverage["asked"]
    assert "**Partial: " in (tmp_path / "docs" / "coverage.md").read_text()
    time.sleep(0.5)
    listed = subprocess.run(
        ["ps", "-eo", "args"], capture_output=True, text=True, check=True
    ).stdout
    assert str(tmp_path) not in listed


# Breaks the tool in one place; its own proof is off, so that only the generated tests are left to
# see it.
BROKEN_TOOL = """
import onboard.codegen.model_file as model_file
import onboard.verify.blocks as prove
from onboard.workflow.sweep import worker
from onboard.workflow.sweep.job import Job

generate = model_file.generate_model_file

def broken(spec):
    text = generate(spec)
    assert {old!r} in text, text
    return text.replace({old!r}, {new!r})

model_file.generate_model_file = broken
prove.prove = lambda text, spec, export=True: [prove.BlockProof("", "", 0.0)]
print(worker.do(Job.model_validate_json({job!r})).model_dump_json())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("config.rms_norm_eps", "10 * config.rms_norm_eps", id="another epsilon"),
        pytest.param("residual + hidden_states", "hidden_states", id="a residual lost"),
    ],
)
def test_a_tool_that_generates_a_wrong_model_gets_no_pass(
    old: str, new: str, warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": "llama", "rms_norm_eps": 1e-2}
    job = {"target": {"name": "llama", "config": config}, "folder": str(tmp_path / "llama")}
    (tmp_path / "broken_tool.py").write_text(
        BROKEN_TOOL.format(old=old, new=new, job=json.dumps(job))
    )
    monkeypatch.chdir(tmp_path)
    done = warm("broken_tool")
    assert done.returncode == 0, done.stderr
    entry = conclude(TargetRecord.model_validate_json(done.stdout.splitlines()[-1]), PHASES[-1])
    assert entry.status == "fail", entry
    assert entry.levels["model"] == "failed"
    assert not (tmp_path / RECORD).exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "there is nothing to sweep over"),
        (["lama"], "Did you mean 'llama'"),
        (["llama", "--until", "analyze"], "is too early to show what works"),
        (["--types", "llama"], "--types chooses among --all-transformers"),
        (["--all-transformers", "--types", "lama"], "Did you mean 'llama'"),
        (["llama", "--limit-seconds", "0"], "is no limit"),
        (["llama", "--address", "127.0.0.1:6379"], "Use it with --executor ray"),
        (["llama", "--executor", "ray", "--address", "nowhere"], "is no address of a Ray cluster"),
        (
            ["llama", "--executor", "ray", "--address", "127.0.0.1:1"],
            "there is no Ray cluster at 127.0.0.1:1",
        ),
    ],
)
def test_a_wrong_request_is_one_line_and_changes_nothing(
    words: list[str], text: str, warm: Warm, tmp_path: Path
) -> None:
    done = warm(*SWEEP[2:], "--root", tmp_path, *words)
    assert done.returncode == 2
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
