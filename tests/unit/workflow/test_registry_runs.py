"""Runs of registry entries: chosen by expressions, each in a process, resumable, and nothing of two
at once is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from onboard import gpu, registry
from onboard.cli.main import run as command
from onboard.composition import layers
from onboard.config import RuntimeConfig
from onboard.errors import OnboardError, UsageError
from onboard.registry import RegistryEntry, load_entries
from onboard.registry_text import insert_entry
from onboard.workflow.registry_results import (
    Result,
    features_of,
    load_results,
    parse_results,
    results_path,
    save_result,
    verified,
)
from onboard.workflow.registry_runs import places, runner
from onboard.workflow.registry_runs.expression import parse
from onboard.workflow.registry_runs.places import CpuPlaces, GpuPlaces
from onboard.workflow.registry_runs.runner import Runner, RunSettings
from onboard.workflow.reporting.support_matrix import empty_matrix, matrix_path, refreshed

NAMES = ("org/a", "org/b", "org/c")

AGENT = """
import json, os, sys, threading, time
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
from pathlib import Path
calls = Path(words["--root"]) / "calls"
with calls.open("a") as file:
    file.write(words["--entry"] + "\\n")
print("agent of", words["--entry"], os.environ["CUDA_VISIBLE_DEVICES"])
time.sleep(float(os.environ.get("AGENT_SECONDS", "0")))
bad = words["--entry"] in os.environ.get("AGENT_FAILS", "").split()
if words["--entry"] in os.environ.get("AGENT_DIES", "").split():
    os._exit(7)
full = {
    "status": "runtime_error" if bad else "success", "error": "it broke" if bad else None,
    "settings": {"device": "cpu", "dtype": "float32", "device_name": "CPU", "max_num_tokens": 32},
    "tokens_per_second": 12.5, "peak_memory_bytes": 7, "prompts": [1, 2], "cuda_graphs": {"used": False},
    "text": {"verdict": "equal", "perplexity": 9.5, "reference": 9.25},
    "comparison": {"agrees": not bad, "checks": [{"what": name, "longest": 40} for name in ("text", "known prefix")]},
}
Path(words["--output"]).write_text(json.dumps(full))
"""
"""Stands in for the run agent: what it is told, how it ends and what it writes are the same."""


class _Told:
    def __init__(self) -> None:
        self.waits: list[tuple[str, str]] = []
        self.logs: list[Path] = []

    def waiting(self, name: str, why: str) -> None:
        self.waits.append((name, why))

    def started(self, name: str, log: Path) -> None:
        self.logs.append(log)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with three entries, whose runs are those of the agent above."""
    _stand_in(_make_root(tmp_path / "root", NAMES), monkeypatch)
    return tmp_path / "root"


def _make_root(folder: Path, names: Sequence[str]) -> Path:
    text = registry.HEADER
    (folder / "registry" / "configs").mkdir(parents=True)
    (folder / "models").mkdir()
    for name in names:
        slug = registry.slug(name.split("/")[1])
        (folder / "registry" / "configs" / f"{slug}.yaml").write_text(f"model: {name}\n")
        (folder / "models" / f"modeling_{slug}.py").write_text("X = 1\n")
        fields = {"architecture": f"{slug.upper()}ForCausalLM", "family": slug}
        entry = RegistryEntry(
            name=name,
            config_id=slug,
            yaml_extra=["dashboard_default.yaml", f"{slug}.yaml"],
            **fields,
        )
        text = insert_entry(text, entry)
    registry.models_path(folder).write_text(text)
    (folder / "agent.py").write_text(AGENT)
    return folder


def _stand_in(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Runner._command

    def command(self: Runner, entry: RegistryEntry, output: Path) -> tuple[list[str], int | None]:
        words, layer_count = whole(self, entry, output)
        assert words[:3] == [sys.executable, "-m", "onboard.workflow.run_model.run_model"]
        return [sys.executable, str(root / "agent.py"), *words[3:]], layer_count

    monkeypatch.setattr(Runner, "_command", command)
    monkeypatch.setattr(runner, "source_hash", lambda: "source")


def _run(root: Path, **settings: Any) -> tuple[dict[str, Result], _Told]:
    told = _Told()
    runs = Runner(root, settings.pop("places", CpuPlaces()), RunSettings(**settings), told)
    return {row.name: row for row, _ in runs.run(runs.todo(load_entries(root)))}, told


def _calls(root: Path) -> list[str]:
    path = root / "calls"
    found = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return found


ENTRY = RegistryEntry(
    name="meta/Llama-8B", config_id="l", yaml_extra=[], family="llama", status="passed"
)


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ("", True),
        ("family=llama", True),
        ("family=LLAMA,qwen3 status=passed", True),
        ("family=llama status!=passed", False),
        ("family!=qwen3,gemma", True),
        ("name~*-8b", True),
        ("name!~meta/*", False),
        ("name~meta", False),
        ("note=", True),
        ("architecture!=", False),
    ],
)
def test_what_an_expression_means(expression: str, holds: bool) -> None:
    assert parse(expression)(ENTRY) is holds


@pytest.mark.parametrize(
    "expression",
    ["family", "famly=llama", "=x", "family==x y", "__class__=x", "(name=a)", "name<a"],
)
def test_what_is_no_expression_is_one_line(expression: str) -> None:
    with pytest.raises(UsageError, match="--filter") as error:
        parse(expression)
    assert "\n" not in str(error.value)


def test_each_runs_in_a_process_and_leaves_log_row_verdict_and_matrix(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_FAILS", "org/b")
    monkeypatch.setenv("AGENT_DIES", "org/c")
    rows, told = _run(root, jobs=3)
    assert sorted(_calls(root)) == sorted(NAMES)
    a, b, c = (rows[name] for name in NAMES)
    assert (a.status, a.tokens_per_second, a.perplexity, a.reference_perplexity) == (
        "passed",
        12.5,
        9.5,
        9.25,
    )
    assert (a.peak_memory_bytes, a.device, a.dtype, a.gpu) == (7, "cpu", "float32", None)
    assert a.versions.keys() == {"onboard", "torch", "transformers"}
    assert a.features == {
        "cuda_graphs": "Untested", "batched_decode": "Yes", "chunked_prefill": "Yes", "prefix_reuse": "Yes",
        "sliding_window": "Untested", "tensor_parallel": "Untested",
    }  # fmt: skip
    assert (b.status, b.outcome, b.error) == ("failed", "runtime_error", "it broke")
    assert (c.status, c.outcome) == ("failed", "lost")
    assert "code 7" in str(c.error)
    assert sorted(load_results(root), key=lambda row: row.name) == [a, b, c]
    assert str(root) not in (root / "registry" / "results.jsonl").read_text(), (
        "rows hold on another machine, too"
    )
    assert all((root / row.log).read_text().startswith("$ ") for row in rows.values())
    assert "agent of org/a" in (root / a.log).read_text()
    assert {entry.name: entry.status for entry in load_entries(root)} == {
        "org/a": "passed", "org/b": "failed", "org/c": "failed",
    }  # fmt: skip
    assert load_entries(root)[0].model_file == registry.digest(root / "models" / "modeling_a.py")
    matrix = matrix_path(root).read_text()
    assert "| `AForCausalLM` | org/a | a |  | cpu float32 | [^a] |" in matrix
    assert f"| org/b | b |  | failed on {b.date[:10]} |" in matrix
    assert "| org/a | Untested | Yes | Yes | Yes | Untested | Untested | N/A |" in matrix
    assert (
        "| org/b | Untested | Untested | Untested | Untested | Untested | Untested | N/A |"
        in matrix
    )
    assert "[^a]: [configs/a.yaml](configs/a.yaml)" in matrix
    assert len(told.logs) == 3


def test_what_passed_as_it_is_is_not_run_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_FAILS", "org/b")
    _run(root)
    _calls(root)
    monkeypatch.setenv("AGENT_FAILS", "")
    _run(root)
    assert _calls(root) == ["org/b"], "what failed is tried again"
    _run(root)
    assert _calls(root) == []
    _run(root, fresh=True)
    assert sorted(_calls(root)) == sorted(NAMES)


def test_changed_are_those_with_another_file_config_or_program(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(root, changed=True)
    assert _calls(root) == [], "there is no row that anything could differ from"
    _run(root)
    _calls(root)
    (root / "models" / "modeling_a.py").write_text("X = 2\n")
    (root / "registry" / "configs" / "b.yaml").write_text("model: org/b\nmax_batch_size: 2\n")
    _run(root, changed=True, jobs=2)
    assert sorted(_calls(root)) == ["org/a", "org/b"]
    (root / "registry" / "configs" / "dashboard_default.yaml").write_text("max_seq_len: 64\n")
    _run(root, changed=True, jobs=2)
    assert sorted(_calls(root)) == sorted(NAMES)
    (root / "transforms").mkdir()
    (root / "transforms" / "default.yaml").write_text("fuse_moe: {enabled: false}\n")
    _run(root, changed=True, jobs=2)
    assert sorted(_calls(root)) == sorted(NAMES)
    monkeypatch.setattr(runner, "source_hash", lambda: "another")
    _run(root, changed=True)
    assert sorted(_calls(root)) == sorted(NAMES)


def test_a_reduced_run_is_no_verdict(root: Path) -> None:
    rows, _ = _run(root, reduced=True)
    assert {row.layers for row in rows.values()} == {2}
    assert {entry.status for entry in load_entries(root)} == {"untested"}
    assert "| org/a | a |  | Untested |" in matrix_path(root).read_text()
    whole, _ = _run(root)
    assert {row.layers for row in whole.values()} == {None}
    assert len(load_results(root)) == 6


def test_runs_on_ranks_have_rows_of_their_own_and_no_verdict(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(root)
    _calls(root)
    monkeypatch.setenv("AGENT_FAILS", "org/b")
    rows, told = _run(root, world_size=2)
    assert sorted(_calls(root)) == sorted(NAMES), "what passed as configured says nothing of ranks"
    assert {row.world_size for row in rows.values()} == {2}
    assert all("--world-size 2" in row.command for row in rows.values())
    assert all("--world-size 2" in path.read_text() for path in told.logs)
    assert {(row.name, row.world_size) for row in load_results(root)} == {
        (name, size) for name in NAMES for size in (None, 2)
    }
    assert {entry.status for entry in load_entries(root)} == {"passed"}, "configured runs passed"
    matrix = matrix_path(root).read_text()
    assert "| org/a | a |  | cpu float32; cpu float32 on 2 ranks |" in matrix
    assert f"| cpu float32; failed on 2 ranks on {rows['org/b'].date[:10]} |" in matrix
    assert {row.world_size for row in _run(root, world_size=2)[0].values()} == {2}
    assert _calls(root) == ["org/b"]
    _run(root, world_size=4)
    assert sorted(_calls(root)) == sorted(NAMES)
    _run(root)
    assert _calls(root) == []


def test_an_entry_ends_at_its_time_limit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_SECONDS", "60")
    start = time.monotonic()
    rows, _ = _run(root, seconds=1.0, jobs=3)
    assert {(row.status, row.outcome) for row in rows.values()} == {("failed", "timeout")}
    assert time.monotonic() - start < 30


PROGRAM = """
from pathlib import Path
import pytest
from tests.unit.workflow import test_registry_runs as here
root = Path({root!r})
here._stand_in(root, pytest.MonkeyPatch())
here._run(root, jobs=2)
"""


def _start(root: Path, seconds: float) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "AGENT_SECONDS": str(seconds)}
    environment["AGENT_OF"] = str(root)
    program = PROGRAM.format(root=str(root))
    return subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE, text=True
    )


def _lines(root: Path) -> set[str]:
    path = results_path(root)
    lines = path.read_text().splitlines() if path.exists() else []
    assert len({json.loads(line)["name"] for line in lines}) == len(lines), "no entry has two rows"
    return set(lines)


def _is_any_left(root: Path) -> bool:
    """Whether a process of a root's run lives. Told by the environment, which a child has from its
    fork on: its command line is its parent's until it has become an agent.
    """
    mark = f"AGENT_OF={root}\0".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes():
                return True
    return False


def _wait_until_none_is_left(root: Path) -> None:
    """What it had just started tells of its call a moment later; a process that becomes another
    program has no environment for an instant.
    """
    quiet = 0
    while quiet < 4:
        quiet = 0 if _is_any_left(root) else quiet + 1
        time.sleep(0.05)


def _kill_with(number: int, root: Path, more: int) -> set[str]:
    """Run until there are `more` rows and end it with a signal; return the rows, of which none was
    lost or changed.
    """
    before, process = _lines(root), _start(root, 0.5)
    _calls(root)
    deadline = time.monotonic() + 120
    while len(_lines(root)) < len(before) + more and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate()
    assert process.returncode == -number
    _wait_until_none_is_left(root)
    after = _lines(root)
    assert len(after) >= len(before) + more
    assert before <= after
    assert not {json.loads(line)["name"] for line in before} & set(_calls(root)), (
        "what had passed was not run again"
    )
    return after


def _matrix_of_rows(root: Path) -> str:
    text = empty_matrix()
    for entry in load_entries(root):
        text = refreshed(text, entry, [row for row in load_results(root) if row.name == entry.name])
    return text


def test_killed_it_goes_on_and_two_at_once_lose_nothing(tmp_path: Path) -> None:
    names = [f"org/m{number}" for number in range(10)]
    root = _make_root(tmp_path / "root", names)
    _kill_with(signal.SIGKILL, root, 2)
    done = _kill_with(signal.SIGTERM, root, 2)
    assert len(done) < len(names)
    _calls(root)
    two = [_start(root, 0.2) for _ in range(2)]
    errors = [process.communicate(timeout=120)[1] for process in two]
    assert [process.returncode for process in two] == [0, 0], errors
    calls = _calls(root)
    assert sorted([*(json.loads(line)["name"] for line in done), *calls]) == sorted(names), (
        "each was run once"
    )
    assert done <= _lines(root)
    assert {entry.status for entry in load_entries(root)} == {"passed"}
    assert matrix_path(root).read_text() == _matrix_of_rows(root)
    assert all(f"| {name} | Untested | Yes |" in matrix_path(root).read_text() for name in names)


class _EndedError(Exception):
    pass


def _ends_after(writes: int, write: Callable[..., Any]) -> Callable[..., Any]:
    left = [None] * writes

    def limited(*file: Any) -> None:
        if not left:
            raise _EndedError
        left.pop()
        write(*file)

    return limited


def test_killed_between_two_files_an_entry_is_as_if_it_had_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, found = runner.write_atomically, set()
    for writes in range(4):
        root = _make_root(tmp_path / str(writes), NAMES)
        entry, row = (
            load_entries(root)[0],
            _row("2026-01-01", name="org/a", device="cpu", dtype="float32"),
        )
        monkeypatch.setattr(runner, "write_atomically", _ends_after(writes, write))
        try:
            runner.keep(root, entry, row)
        except _EndedError:
            assert load_results(root) == [], "it is run again"
        monkeypatch.setattr(runner, "write_atomically", write)
        runner.keep(root, entry, row)
        paths = (results_path(root), matrix_path(root), registry.models_path(root))
        found.add(tuple(path.read_text() for path in paths))
    assert len(found) == 1


def test_an_entry_that_another_run_has_is_waited_for_and_not_run_twice(root: Path) -> None:
    folder = root / ".onboard" / runner.FOLDER / "a"
    folder.mkdir(parents=True)
    lock = FileLock(folder / ".lock", thread_local=False)
    lock.acquire()
    told, found = _Told(), []
    runs = Runner(root, CpuPlaces(), RunSettings(), told)
    entry = load_entries(root)[0]
    thread = threading.Thread(target=lambda: found.extend(runs.run([entry])))
    thread.start()
    while not told.waits:
        time.sleep(0.01)
    row = Result(
        name="org/a",
        status="passed",
        date="2026-01-01T00:00:00+00:00",
        device="cpu",
        key=runs._key(entry),
    )
    save_result(root, row)
    lock.release()
    thread.join(30)
    assert found == [(row, False)]
    assert _calls(root) == []


def test_an_entry_that_another_run_did_since_this_one_began_is_not_run_again(root: Path) -> None:
    entry = load_entries(root)[0]
    first, second = (Runner(root, CpuPlaces(), RunSettings(fresh=True), _Told()) for _ in range(2))
    [(row, ran)] = second.run([entry])
    assert ran
    assert list(first.run([entry])) == [(row, False)]
    assert _calls(root) == [entry.name]
    [(_, ran)] = Runner(root, CpuPlaces(), RunSettings(fresh=True), _Told()).run([entry])
    assert ran


def test_gpus_are_taken_when_they_are_free_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [0, 2]
    monkeypatch.setattr(places, "free_gpus", lambda: list(free))
    mine, others = (GpuPlaces(tmp_path, poll_seconds=0.01) for _ in range(2))
    stopped, waits = threading.Event(), []
    first = mine.take(waits.append, stopped)
    second = others.take(waits.append, stopped)
    assert first is not None
    assert second is not None
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in (first, second)] == ["0", "2"]
    threading.Timer(0.2, first.leave).start()
    third = mine.take(waits.append, stopped)
    assert third is not None
    assert third.environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert len(waits) == 1
    free.clear()
    threading.Timer(0.1, stopped.set).start()
    assert mine.take(waits.append, stopped) is None


def test_ranks_have_a_gpu_each_or_none_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [0, 2, 5]
    monkeypatch.setattr(places, "free_gpus", lambda: list(free))
    pairs, one = GpuPlaces(tmp_path, 0.01, each=2), GpuPlaces(tmp_path, 0.01)
    stopped, waits = threading.Event(), []
    first = pairs.take(waits.append, stopped)
    assert first is not None
    assert first.environment["CUDA_VISIBLE_DEVICES"] == "0,2"
    threading.Timer(0.1, stopped.set).start()
    assert pairs.take(waits.append, stopped) is None
    assert waits == [
        "fewer than 2 free GPUs (3 have free memory, some of them taken by other runs of the registry)"
    ]
    stopped.clear()
    single = one.take(waits.append, stopped)
    assert single is not None, "a pair that was not there holds none"
    assert single.environment["CUDA_VISIBLE_DEVICES"] == "5"
    first.leave()
    second = pairs.take(waits.append, stopped)
    assert second is not None
    assert second.environment["CUDA_VISIBLE_DEVICES"] == "0,2"


def test_more_ranks_than_gpus_are_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "list_gpus", lambda: [gpu.Gpu("a", 100, 100)])
    assert command(["registry", "run", "--root", str(root), "--world-size", "2"]) == 2
    assert "there is 1 GPU here, not 2" in capsys.readouterr().err


def test_free_gpus_are_those_that_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {0: gpu.Gpu("a", 100, 99), 1: gpu.Gpu("a", 100, 50), 3: gpu.Gpu("a", 100, 100)}
    monkeypatch.setattr(gpu, "_visible_gpus", lambda: cards)
    assert gpu.free_gpus() == [0, 3]
    assert gpu.list_gpus() == list(cards.values())


def _row(date: str, **fields: Any) -> Result:
    return Result.model_validate(
        {"name": "a", "status": "passed", "date": date, "text": "equal", **fields}
    )


def test_rows_say_where_a_model_works_and_that_its_last_run_failed() -> None:
    cpu = _row("2026-01-01", device="cpu", dtype="float32", features={"batched_decode": "Yes"})
    cuda = _row(
        "2026-01-02", device="cuda", dtype="bfloat16", features={"cuda_graphs": "No"}, text=""
    )
    failed = _row("2026-01-03", device="cuda", dtype="float32", status="failed")
    reduced = _row("2026-01-04", device="cuda", dtype="float16", layers=2)
    assert verified([cpu, cuda, reduced]) == "cpu float32; cuda bfloat16, text not judged"
    assert verified([cpu, failed]) == "cpu float32; failed on 2026-01-03"
    assert verified([reduced]) == verified([]) == ""
    assert verified([failed, _row("2026-01-05", device="cuda", dtype="float32")]) == "cuda float32"
    found = features_of([cpu, cuda, _row("2026-01-01T01", features={"cuda_graphs": "Yes"})])
    assert (found["cuda_graphs"], found["batched_decode"], found["chunked_prefill"]) == (
        "No",
        "Yes",
        "Untested",
    )


def test_a_broken_line_of_results_is_named() -> None:
    good = _row("2026-01-01").model_dump_json()
    for bad in (
        "{",
        '{"name": 3}',
        '{"name": "a", "status": "fine", "date": ""}',
        '{"nme": 1}',
        "[]",
    ):
        with pytest.raises(OnboardError, match=r"results\.jsonl:2") as error:
            parse_results(f"{good}\n{bad}\n")
        assert "\n" not in str(error.value)


def test_the_command(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--root", str(root)]
    assert command(["registry", "list", *where, "--filter", "name~*/a", "--json"]) == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == ["org/a"]
    (root / "registry" / "configs" / "small.yaml").write_text("max_seq_len: 64\n")
    models = registry.models_path(root)
    models.write_text(
        models.read_text().replace("      - a.yaml\n", "      - small.yaml\n      - a.yaml\n")
    )
    assert command(["registry", "show", "org/a", "--resolved", *where]) == 0
    assert "max_seq_len: 64  # small.yaml" in capsys.readouterr().out
    assert command(["registry", "show", "org/A", *where]) == 2
    assert "Did you mean 'org/" in capsys.readouterr().err
    assert command(["registry", "validate", *where]) == 0
    assert (
        command(
            ["registry", "run", "--device", "cpu", "--jobs", "3", "--filter", "family=a,b", *where]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert "2 passed" in out
    assert "2 of 2 entries to run" in err
    assert sorted(_calls(root)) == ["org/a", "org/b"]
    (root / "registry" / "configs" / "small.yaml").write_text("max_sq_len: 64\n")
    assert command(["registry", "validate", *where]) == 1
    assert "org/a: error: the registry entry org/a" in capsys.readouterr().out
    assert command(["registry", "run", "org/z", *where]) == 2
    assert command(["registry", "list", "--root", str(root / "nowhere")]) == 1


def test_a_fragment_after_which_all_is_said_again_is_named(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "registry" / "configs" / "first.yaml").write_text("max_seq_len: 64\n")
    (root / "registry" / "configs" / "a.yaml").write_text("model: org/a\nmax_seq_len: 96\n")
    models = registry.models_path(root)
    models.write_text(
        models.read_text().replace("      - a.yaml\n", "      - first.yaml\n      - a.yaml\n")
    )
    assert command(["registry", "validate", "--root", str(root)]) == 0
    assert "org/a: first.yaml changes nothing" in capsys.readouterr().out
    assert layers(load_entries(root)[0], root)[-1].values == {"model": "org/a", "max_seq_len": 96}
    assert RuntimeConfig().max_seq_len != 96
