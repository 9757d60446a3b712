"""`onboard status`: the models under a root and how far each has come."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onboard.cli import options
from onboard.cli.result import Result
from onboard.cli.terminal import shown

if TYPE_CHECKING:
    from onboard.agents.role_runs import RoleRun
    from onboard.workflow.run_state import RunState


def status(
    root: Annotated[
        Path,
        typer.Option(
            help="Root folder that models were onboarded under.",
            file_okay=False,
            show_default="here",
        ),
    ] = Path(),
    as_json: options.AsJson = False,
) -> Result | None:
    """Show models, how far each has come, and what waits for whom."""
    from onboard.pull_request.standing import standings

    states = load_states(root)
    if as_json:
        models = {name: state.model_dump(mode="json") for name, state in states.items()}
        found = load_agents(root, states)
        runs = {name: [run.document() for run in each] for name, each in found.items()}
        return Result(
            {
                "root": str(root.resolve()),
                "models": models,
                "agents": runs,
                "pull_requests": [each.model_dump(mode="json") for each in standings(root)],
            }
        )
    if states:
        _print_table(states)
        _print_agents(load_agents(root, states))
        for each in standings(root):
            print("\n".join(map(shown, each.lines)))
    else:
        print(f"No model was onboarded under {root.resolve()}. Run: onboard MODEL --root {root}")
    return None


def load_states(root: Path) -> dict[str, RunState]:
    """Return the state of every model under `root`, by the name of its work folder.

    What a run left "running" that has ended since was interrupted.
    """
    from onboard.workflow.lock import WORK, is_held
    from onboard.workflow.run_state import STATE_FILE, RunState

    folders = sorted(path.parent for path in (root / WORK).glob(f"*/{STATE_FILE}"))
    states = {folder: RunState.load(folder, folder.name) for folder in folders}
    return {
        folder.name: state if is_held(folder) else state.at_rest()
        for folder, state in states.items()
    }


def load_agents(root: Path, states: Iterable[str]) -> dict[str, list[RoleRun]]:
    """Return the runs of roles by the name of the model's work folder; those without any are left
    out.

    What a run left "running" that has ended since waits for nothing any more.
    """
    from onboard.agents.role_runs import load_runs
    from onboard.workflow.lock import WORK, is_held

    found = {}
    for name in states:
        folder = root / WORK / name
        if runs := load_runs(folder):
            held = is_held(folder)
            found[name] = runs if held else [_at_rest(run) for run in runs]
    return found


def _at_rest(run: RoleRun) -> RoleRun:
    stopped = {"status": "interrupted", "waits_for": ""}
    return run.model_copy(update=stopped if run.status == "running" else {})


def _print_agents(models: dict[str, list[RoleRun]]) -> None:
    """Print who plays which role of each model, and what it waits for; the rules, while they do."""
    for name, runs in models.items():
        for run in runs:
            if run.back_end == "builtin" and run.status != "running":
                continue
            stand = f"waits for {run.waits_for}" if run.waits_for else run.status
            print(shown(f"{name}: {run.role} ({run.back_end}) {stand}: {run.about}"))


def _print_table(states: dict[str, RunState]) -> None:
    from rich.console import Console
    from rich.table import Table

    from onboard.workflow.phases import PHASES

    table = Table("model", "phases", "stands at", "seconds")
    for state in states.values():
        done = [
            name for name in PHASES if name in state.phases and state.phases[name].status == "done"
        ]
        open_ = [name for name in PHASES if name not in done]
        record = state.phases.get(open_[0]) if open_ else None
        stand = (
            "complete"
            if not open_
            else f"{open_[0]}: {record.error or record.status if record else 'to do'}"
        )
        seconds = sum(record.seconds for record in state.phases.values())
        table.add_row(state.model, f"{len(done)}/{len(PHASES)}", stand, f"{seconds:.1f}")
    Console().print(table, markup=False)
