"""Where a run takes place, of several GPUs, and when it is repeated on another."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from onboard import gpu
from onboard.agents.role_runs import load_runs
from onboard.agents.role_settings import AgentsSettings, Builtin
from onboard.errors import UsageError
from onboard.hub import open_source
from onboard.registry import config_path
from onboard.runtime.ranks import devices_here
from onboard.workflow import team
from onboard.workflow.phase import RunContext
from onboard.workflow.phases.register import Register
from onboard.workflow.phases.run import Run, check_ranks, run_somewhere
from onboard.workflow.run_model.runner_record import note_runs
from tests.support.assignments import scripted
from tests.support.checkpoints import save_checkpoint
from tests.support.phases import make_context

FULL, EMPTY = gpu.Gpu("a", 100, 10), gpu.Gpu("a", 100, 100)
NO_ROOM = {"status": "runtime_error", "error": "CUDA out of memory: 20 MiB", "prompts": []}
PASSED = {"status": "success", "error": None, "facts": ["a fact"]}


class Agent:
    """Stands in for the process of the run agent: notes its environment, writes the next result."""

    def __init__(self, results: Sequence[Mapping[str, Any]]) -> None:
        self.results, self.devices = list(results), list[str | None]()

    def __call__(
        self,
        words: Sequence[str],
        output: IO[Any],
        *,
        folder: Path | None = None,
        environment: Mapping[str, str],
    ) -> int:
        self.devices.append(environment.get("CUDA_VISIBLE_DEVICES"))
        Path(words[list(words).index("--output") + 1]).write_text(json.dumps(self.results.pop(0)))
        return 0


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunContext:
    made = make_context(tmp_path / "root", "acme/x")
    made.options.device = "cuda"
    Register().run(made)
    monkeypatch.setenv("ONBOARD_CACHE", str(tmp_path / "cache"))
    return made


def _run(context: RunContext, agent: Agent) -> dict[str, Any]:
    context.run_module = agent
    return run_somewhere(context, context.artifact("run.log"), "all layers", None)


def test_of_several_gpus_a_free_one_is_taken(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_visible_gpus", lambda: {0: FULL, 1: EMPTY, 2: FULL})
    agent = Agent([PASSED])
    assert _run(context, agent) == {**PASSED, "description": "all layers"}
    assert agent.devices == ["1"]


def test_one_gpu_or_the_cpu_is_taken_as_it_is(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_visible_gpus", lambda: {0: FULL})
    agent = Agent([PASSED, NO_ROOM])
    _run(context, agent)
    assert _run(context, agent)["status"] == "runtime_error"  # nowhere else to go
    monkeypatch.setattr(gpu, "_visible_gpus", lambda: {0: FULL, 1: EMPTY})
    context.options.device = "cpu"
    agent.results.append(PASSED)
    _run(context, agent)
    assert agent.devices == [None, None, None]


def test_a_gpu_is_waited_for_with_progress_and_then_shared(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = {0: FULL, 1: FULL}
    monkeypatch.setattr(gpu, "_visible_gpus", lambda: cards)
    told: list[str] = []

    def tell(line: str) -> None:
        (run,) = load_runs(context.work_dir)
        assert line == f"waits: {run.waits_for}"
        assert (run.role, run.back_end, run.status) == ("runner", "builtin", "running")
        told.append(line)

    context.doing = tell
    context.options.agents = AgentsSettings(runner=Builtin(seconds=0.3))
    agent = Agent([PASSED])
    found = _run(context, agent)
    assert found["facts"] == ["a fact", "no GPU was free within 0.3 s: the run shares one"]
    assert told[0].startswith("waits: no free GPU")
    (run,) = load_runs(context.work_dir)
    assert (run.status, run.waits_for) == ("done", "")
    assert agent.devices == [None]


def test_a_run_without_room_is_repeated_with_what_it_learnt_and_not_for_ever(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_visible_gpus", lambda: {0: EMPTY, 1: EMPTY})
    agent = Agent([NO_ROOM, PASSED])
    found = _run(context, agent)
    assert (found["status"], found["description"]) == ("success", "all layers")
    assert found["facts"] == ["a fact", "retry after: CUDA out of memory: 20 MiB"]
    (run,) = load_runs(context.work_dir)
    assert (run.world_size, run.gpus, run.attempts) == (1, ["GPU 0"], 2)
    assert run.refusals == ["CUDA out of memory: 20 MiB"]
    assert (run.status, run.after) == ("done", "success")
    log = context.artifact("run.log").read_text()
    assert "=== all layers\n" in log
    assert "=== all layers; retry after: CUDA out of memory: 20 MiB\n" in log
    agent = Agent([NO_ROOM] * 5)
    assert _run(context, agent)["status"] == "runtime_error"
    assert len(agent.devices) == 3
    agent = Agent([{"status": "runtime_error", "error": "the logits are NaN"}] * 2)
    _run(context, agent)
    assert len(agent.devices) == 1
    (run,) = load_runs(context.work_dir)
    assert (run.status, run.attempts) == ("failed", 1)
    assert run.after == "runtime_error: the logits are NaN"
    assert threading.active_count() < 10


def test_a_run_that_cannot_even_start_is_recorded_as_failed(context: RunContext) -> None:
    class NoProgram(Agent):
        def __call__(self, *_: Any, **__: Any) -> int:
            raise OSError("no such program")

    with pytest.raises(OSError, match="no such program"):
        _run(context, NoProgram([]))
    (run,) = load_runs(context.work_dir)
    assert (run.status, run.after) == ("failed", "OSError: no such program")


def test_a_run_with_fewer_gpus_than_registered_that_do_not_hold_it_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save_checkpoint(tmp_path / "x")
    context = make_context(tmp_path / "root", str(checkpoint))
    context.source = open_source(str(checkpoint))
    context.options.device = "cpu"
    Register().run(context)
    path = config_path(context.root, context.read_json("registration.json")["config_id"])
    text = path.read_text()
    path.write_text(text.replace("world_size: 1\n", "world_size: 2\n"))
    assert path.read_text() != text
    check_ranks(context)  # it fits
    monkeypatch.setattr(devices_here, "device_memory", lambda _: gpu.Memory(2**17, 2**17))
    with pytest.raises(UsageError) as caught:
        Run().run(context)
    assert str(caught.value) == (
        "x is configured for 2 GPUs; none are used here, and the host has 0.12 MiB, which it does not"
        " fit. Use a host with 2; onboard plan says what each takes"
    )
    assert caught.value.exit_code == 2
    assert not load_runs(context.work_dir)


def test_a_run_on_several_gpus_sees_them_all(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config_path(context.root, context.read_json("registration.json")["config_id"])
    path.write_text(path.read_text().replace("world_size: 1\n", "world_size: 2\n"))
    monkeypatch.setattr(gpu, "_visible_gpus", lambda: {0: FULL, 1: EMPTY})
    settings = {"device": "cuda", "device_name": "a", "world_size": 2}
    agent = Agent([{**PASSED, "settings": settings}])
    _run(context, agent)
    assert agent.devices == [None]
    (run,) = load_runs(context.work_dir)
    assert run.world_size == 2


def test_the_runs_are_logged_once_for_people_and_programs(context: RunContext) -> None:
    result = _run(context, Agent([PASSED]))
    result["status"] = "success"
    whole = {"status": "success", "config": "c.yaml", "log": "x.log", "world_size": 1}
    note_runs(context, whole | {"runs": {"full": result}})
    (entry,) = context.worklog.entries()
    assert {name: entry[name] for name in whole} == whole
    assert [run["about"] for run in entry["runs"]] == ["run acme/x: all layers"]
    assert entry["runs"][0]["world_size"] == 1
    assert context.worklog.path is not None
    assert context.worklog.path.read_text().count("run agent: success") == 1


def test_an_agent_judges_the_texts_and_sees_them_whole(context: RunContext) -> None:
    answer = {"verdict": "incoherent", "reason": "the same word again and again"}
    context.options.agents = AgentsSettings(runner=scripted(f"print({json.dumps(answer)!r})"))
    log = context.artifact("run.log")
    log.write_text("built\n")
    pairs = [{"prompt": "Once upon a time", "output": "the the the"}]
    run = {"description": "all layers", "status": "success", "prompts": pairs, "facts": []}
    found = team.judged_text(context, run, log)
    assert found == {**answer, "learnt": ""}
    (recorded,) = load_runs(context.work_dir)
    assert "the the the" in (context.work_dir / recorded.transcript).read_text()
    context.options.agents = AgentsSettings()
    assert team.judged_text(context, run, log) is None
