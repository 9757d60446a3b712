"""`onboard <id or folder>`: run the workflow for one model."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onboard.cli.options import Device, DTypeName, InDType, ModeName, Offline, OnDevice
from onboard.cli.result import Result
from onboard.cli.terminal import shown
from onboard.errors import OnboardError, UntranslatableError
from onboard.workflow.phases import PHASES

if TYPE_CHECKING:
    from onboard.workflow.outcome import RunOutcome
    from onboard.workflow.phase import RunContext, RunOptions


ABOUT = f"""Onboard a Hugging Face causal language model: fast, proven and servable.

Run it again to resume: a phase whose inputs did not change is skipped.

Phases: {", ".join(PHASES)}.

Exit codes: 0 done; 1 failed; 2 the request is invalid; 3 needs your consent; 130 interrupted.
"""


_Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Checkpoint folder, or Hugging Face id."),
]
_Root = Annotated[
    Path,
    typer.Option(
        help="Root folder: all files are written under it.", file_okay=False, show_default="here"
    ),
]
_Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")]
_Until = Annotated[str | None, typer.Option(metavar="PHASE", help="Stop after this phase.")]
_From = Annotated[
    str | None, typer.Option("--from", metavar="PHASE", help="Rerun this phase and all later ones.")
]
_Fresh = Annotated[bool, typer.Option("--fresh", help="Rerun every phase.")]
_DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show the changes to files without writing them.")
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]
_TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Allow the repository's own Python code to run, in a sandbox."
    ),
]
_Unsandboxed = Annotated[
    bool,
    typer.Option("--unsandboxed", help="Allow that code to run where the system has no sandbox."),
]
_Yes = Annotated[
    bool, typer.Option("--yes", help="Continue even if the model does not fit in memory.")
]
_Strict = Annotated[
    bool, typer.Option("--strict", help="Fail if the full run falls back anywhere.")
]
_Agents = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="YAML whose `agents:` says who plays which role."),
]
_Agent = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ROLE=WHO",
        help="Who plays a role: builtin, command:WORDS or openai:MODEL@URL; repeatable.",
    ),
]
_Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and warnings of libraries.")]


def onboard(
    model: _Model,
    root: _Root = Path(),
    revision: _Revision = None,
    device: OnDevice = Device.AUTO,
    dtype: InDType = DTypeName.AUTO,
    until: _Until = None,
    from_: _From = None,
    fresh: _Fresh = False,
    dry_run: _DryRun = False,
    as_json: _AsJson = False,
    trust_remote_code: _TrustRemoteCode = False,
    unsandboxed: _Unsandboxed = False,
    yes: _Yes = False,
    offline: Offline = False,
    strict: _Strict = False,
    agents: _Agents = None,
    agent: _Agent = None,
    debug: _Debug = False,
) -> Result | int:
    """Run the phases for one model; `ABOUT` is what the help says of it."""
    from onboard.agents.role_settings import load_settings
    from onboard.workflow.phase import RunOptions

    options = RunOptions(
        agents=load_settings(agents, agent or ()),
        revision=revision,
        device=device.value,
        dtype=dtype.value,
        trust_remote_code=trust_remote_code,
        unsandboxed=unsandboxed,
        yes=yes,
        offline=offline,
        strict=strict,
        dry_run=dry_run,
    )
    run = ModelRun(model, root, options)
    error = run.with_way_out(run.execute(until=until, from_=from_, fresh=fresh))
    if as_json:
        return Result(run.fields(), error)
    run.print_text(error)
    if error is not None:
        raise error
    return 0


TRANSLATING = ("analyze", "generate", "test")
"""Phases that fail where a model is not understood."""


@dataclass
class ModelRun:
    """One run and what there is to print about it."""

    model: str
    root: Path
    options: RunOptions
    context: RunContext | None = None
    outcome: RunOutcome | None = None

    def execute(self, *, until: str | None, from_: str | None, fresh: bool) -> BaseException | None:
        """Run the phases; return the error that ended them, if any."""
        from onboard.cli.progress import observer
        from onboard.workflow.phase_runner import PhaseRunner, load_phases, open_run
        from onboard.workflow.processes.warm import WarmPrograms

        programs = WarmPrograms()
        try:
            self.context = open_run(self.model, self.root, self.options)
            self.context.run_module, self.context.warm_up = programs, programs.start
            runner = PhaseRunner(load_phases(), observer())
            self.outcome = runner.run(self.context, until=until, from_=from_, fresh=fresh)
        except (OnboardError, KeyboardInterrupt) as error:
            return error
        finally:
            programs.close()
        return self.outcome.exception

    def with_way_out(self, error: BaseException | None) -> BaseException | None:
        """Return the error with the road that is left in its hint: transformers' own model, when it
        knows the type.
        """
        failed = (
            self.outcome.phases[-1].name if self.outcome is not None and self.outcome.phases else ""
        )
        if (
            not isinstance(error, OnboardError)
            or type(error) not in (OnboardError, UntranslatableError)
            or failed not in TRANSLATING
            or self.context is None
        ):
            return error
        if not _is_known(self.context.source.config().get("model_type")):
            return error
        command = shlex.join(["onboard", "run", self.model, "--mode", ModeName.HF])
        first = f"{error.hint.rstrip('.')}. Or run" if error.hint else "Run"
        return OnboardError(error.message, hint=f"{first} transformers' own model: {command}")

    def fields(self) -> dict[str, Any]:
        """Return the command's own fields of the document of --json."""
        document: dict[str, Any] = {"model": self.model, "phases": [], "artifacts": {}}
        if self.outcome is not None:
            document = self.outcome.document() | {"model": self.model}
        if self.options.dry_run:
            document["files"] = self._pending()
        if self.context is not None and (replaced := self.context.files.replaced):
            document["replaced"] = [
                {"path": str(each.path), "backup": str(each.backup)} for each in replaced
            ]
        return document

    def print_text(self, error: BaseException | None) -> None:
        """Print where the files are, or the diffs of a dry run; for a failed run the command that
        resumes it.

        What became of a user's file that was replaced comes first.
        """
        for replaced in self.context.files.replaced if self.context is not None else ():
            print(
                f"{replaced.diff}\n{replaced.path} was replaced, the old file is {replaced.backup}",
                file=sys.stderr,
            )
        if self.options.dry_run:
            _print_pending(self._pending())
        elif error is not None:
            if self.context is not None and self.context.work_dir.exists():
                print(f"resume with: {resume_command(sys.argv[1:])}", file=sys.stderr)
        elif self.outcome is not None:
            _print_artifacts(self.outcome.document()["artifacts"])

    def _pending(self) -> list[dict[str, Any]]:
        """Return the files that would be written: the user's first, then those that only record the
        run.
        """
        if self.context is None:
            return []
        files, root, internal = self.context.files, self.context.root, self.context.work_dir
        paths = sorted(files.pending, key=lambda path: path.is_relative_to(internal))
        return [
            {
                "path": str(path),
                "diff": files.diff(path, root),
                "internal": path.is_relative_to(internal),
            }
            for path in paths
        ]


def _print_pending(files: list[dict[str, Any]]) -> None:
    """Print how much of each file would change, and of files that do not only record the run
    what.
    """
    for file in files:
        print(f"{_changes(file['diff']):>14}  {file['path']}")
    for file in files:
        if file["diff"] and not file["internal"]:
            print(f"\n{file['diff']}")


def _changes(diff: str) -> str:
    """Return the numbers of lines that a diff adds and takes away, as git's --stat does."""
    lines = diff.splitlines()[2:]
    counts = {sign: sum(line.startswith(sign) for line in lines) for sign in "+-"}
    return " ".join(f"{sign}{count}" for sign, count in counts.items() if count) or "unchanged"


def _is_known(model_type: object) -> bool:
    """Tell whether transformers has a causal language model of a type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _print_artifacts(artifacts: dict[str, str]) -> None:
    """Print what the model wrote, where each file is, and last what to look at."""
    if "run" in artifacts:
        for record in json.loads(Path(artifacts["run"]).read_text(encoding="utf-8"))["runs"][
            "full"
        ]["prompts"]:
            # Token ids of a checkpoint without a tokenizer say nothing
            if record["prompt"] is not None:
                print(shown(f"> {record['prompt']}\n{record['output'].strip()}\n"))
    width = max(map(len, artifacts), default=0)
    print("\n".join(f"{name:<{width}}  {path}" for name, path in artifacts.items()))
    if "report_html" in artifacts:
        print(f"\nreport: {artifacts['report_html']}")


def resume_command(arguments: list[str]) -> str:
    """Return the command that goes on where this one stopped: the same, without what makes it start
    over.
    """
    kept = list(arguments)
    if "--from" in kept:
        del kept[kept.index("--from") : kept.index("--from") + 2]
    return shlex.join(
        [
            "onboard",
            *(word for word in kept if word != "--fresh" and not word.startswith("--from=")),
        ]
    )
