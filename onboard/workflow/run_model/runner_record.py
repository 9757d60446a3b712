"""The runner's own record of a run: on how many GPUs and which, what it waits for, how often it has
tried and what that taught.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from onboard.agents.role_runs import Clock, Records, RoleRun, load_runs
from onboard.workflow.phase import RunContext
from onboard.workflow.run_state import hash_inputs

RETRY = "retry after: "
"""What a fact begins with of a run that was tried again."""


@dataclass
class RunnerRecord:
    """A run of the rules that play the runner, in `agents.json` as it goes on."""

    context: RunContext
    records: Records
    run: RoleRun

    def waits(self, why: str) -> None:
        """Note what it waits for, and tell it."""
        self.run.waits_for = why
        self.records.save()
        self.context.doing(f"waits: {why}")

    def starts(self, environment: Mapping[str, str]) -> None:
        """Note another try, and the GPU that it has got; none where there was nothing to choose."""
        self.run.attempts += 1
        self.run.waits_for = "the run"
        chosen = environment.get("CUDA_VISIBLE_DEVICES", "")
        self.run.gpus = [f"GPU {chosen}"] if chosen else []
        self.records.save()

    def learns(self, why: str) -> None:
        """Note why it is tried again."""
        self.run.refusals.append(why)

    def ends(self, result: Mapping[str, Any]) -> None:
        """Note what came of it."""
        settings = result.get("settings", {})
        self.run.world_size = settings.get("world_size", self.run.world_size)
        self.run.status = "done" if result["status"] == "success" else "failed"
        self.run.after = result["status"] + (f": {result['error']}" if result.get("error") else "")
        if settings.get("device") == "cuda" and not self.run.gpus:
            self.run.gpus = [settings["device_name"]]


@contextmanager
def runner_record(
    context: RunContext, description: str, inputs: Any, world_size: int
) -> Iterator[RunnerRecord]:
    """Yield the record of a run that begins now; an error that it ends in is noted.

    Args:
        context: the model's run.
        description: which run it is: "all layers".
        inputs: what it follows from besides the model's files, as JSON-able data.
        world_size: GPUs that it is registered with; once it has ended, those that it had.
    """
    records = Records.load(context.work_dir, context.files.write)
    digests = context.digest_of(f"models/modeling_{context.spec.family}.py")
    run = RoleRun(
        role="runner",
        back_end="builtin",
        about=_about(context, description),
        input_hash=hash_inputs({"run": [description, inputs], "files": digests}, {}),
        world_size=world_size,
    )
    records.runs = [known for known in records.runs if known.input_hash != run.input_hash]
    records.runs.append(run)
    record = RunnerRecord(context, records, run)
    try:
        with Clock(run):
            yield record
    except Exception as error:
        run.status, run.after = "failed", " ".join(f"{type(error).__name__}: {error}".split())
        raise
    finally:
        run.waits_for = ""
        records.save()


def note_runs(context: RunContext, result: Mapping[str, Any]) -> None:
    """Log the runs of the run phase once they have ended: for people a line each, for programs whole.

    Args:
        context: the model's run.
        result: what the phase leaves as `run.json`.
    """
    lines = [f"- {fact}" for fact in result["runs"].get("full", {}).get("facts", [])]
    for name, run in result["runs"].items():
        error = f": {run['error']}" if run["error"] else ""
        lines.append(f"- {name} ({run['description']}): {run['status']}{error}")
    told = {
        "status": result["status"],
        "config": result["config"],
        "log": result["log"],
        "world_size": result["world_size"],
    }
    described = {_about(context, run["description"]) for run in result["runs"].values()}
    recorded = [run for run in load_runs(context.work_dir) if run.about in described]
    context.worklog.append(
        f"run agent: {result['status']}",
        "\n".join(
            [*(f"- {name.replace('_', ' ')}: {value}" for name, value in told.items()), *lines]
        ),
        role="runner",
        back_end="builtin",
        runs=[run.document() for run in recorded],
        **told,
    )


def _about(context: RunContext, description: str) -> str:
    return f"run {context.model}: {description}"
