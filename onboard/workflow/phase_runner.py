"""Runs the phases of a model in order, skips those whose inputs did not change, and remembers each
as it ends.

Before a phase changes files, the state says "running"; after it, "done" with the digests of what it
left. So a run that was killed anywhere repeats the phase it was in, and a phase writes the same
files each time. What the phases that judge the input write is held back until all of them have
passed: bad input changes nothing under the root.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from onboard.config import suggest
from onboard.errors import OnboardError, UsageError, unfit_package
from onboard.hub import open_source
from onboard.registry import identity
from onboard.workflow.files import FileWriter
from onboard.workflow.lock import STAGING, WORK, check_writable, exclusive, slug
from onboard.workflow.outcome import PhaseOutcome, RunOutcome
from onboard.workflow.phase import Phase, PhaseResult, RunContext, RunOptions
from onboard.workflow.phases import PHASES
from onboard.workflow.run_state import (
    STATE_FILE,
    Artifact,
    PhaseRecord,
    RunState,
    current_versions,
    hash_inputs,
    written_under,
)
from onboard.workflow.worklog import Worklog


class Observer(Protocol):
    """Who is told about progress."""

    def waiting(self) -> None:
        """Another run has the model's lock."""

    def started(self, name: str) -> None:
        """A phase begins its work."""

    def doing(self, text: str) -> None:
        """The phase that runs has come this far: what it is at, or how much of it is done."""

    def finished(self, outcome: PhaseOutcome) -> None:
        """A phase is done, skipped or failed."""


def load_phases() -> list[Phase]:
    """Return an instance of every phase, in order."""
    return [load_phase(name) for name in PHASES]


def load_phase(name: str) -> Phase:
    """Import the module of a phase and return an instance of the one phase class that it
    defines.
    """
    module = importlib.import_module(f"onboard.workflow.phases.{name}")
    classes = [value for value in vars(module).values() if _is_phase_of(value, module.__name__)]
    assert len(classes) == 1, f"{module.__name__} defines {len(classes)} phases"
    phase: Phase = classes[0]()
    assert phase.name == name, f"{module.__name__} defines the phase {phase.name}"
    return phase


def _is_phase_of(value: object, module: str) -> bool:
    return (
        inspect.isclass(value)
        and issubclass(value, Phase)
        and not inspect.isabstract(value)
        and value.__module__ == module
    )


def open_run(model: str, root: Path, options: RunOptions) -> RunContext:
    """Return the context for onboarding `model` under `root`; nothing is fetched or written yet.

    A local folder goes by its absolute path from here on, however it was written.
    """
    if not model:
        raise UsageError(
            "the name of the model is empty", hint="Give a model's folder or an id such as org/name"
        )
    root, model = root.expanduser().resolve(), identity(model)
    work_dir = work_folder(root, model)
    return RunContext(
        model=model,
        root=root,
        work_dir=work_dir,
        options=options,
        files=FileWriter(
            dry_run=options.dry_run,
            staging=work_dir / STAGING,
            root=root,
            written_by_others=partial(written_under, root / WORK),
        ),
        worklog=Worklog(None if options.dry_run else work_dir / "worklog.md"),
        source=open_source(model, revision=options.revision, offline=options.offline),
    )


def work_folder(root: Path, model: str) -> Path:
    """Return the folder of a model's artifacts: `slug`, with a digest when another model's folder
    has that name.
    """
    folder = root / WORK / slug(model)
    return (
        folder
        if _may_have(folder, model)
        else folder.with_name(f"{folder.name}-{sha256(model.encode()).hexdigest()[:8]}")
    )


def _may_have(folder: Path, model: str) -> bool:
    """Tell whether a work folder is the model's, or nobody's (any more)."""
    try:
        owner = RunState.load(folder, model).model
    except OnboardError:  # unreadable: said when the state is needed
        return True
    return owner == model or (owner.startswith("/") and not Path(owner).exists())


@dataclass
class PhaseRunner:
    """Runs phases; `observer` hears of each."""

    phases: Sequence[Phase]
    observer: Observer

    def run(
        self,
        context: RunContext,
        *,
        until: str | None = None,
        from_: str | None = None,
        fresh: bool = False,
    ) -> RunOutcome:
        """Run the phases up to `until`.

        Args:
            context: the model's run.
            until: the last phase to run; None: all of them.
            from_: rerun from this phase on, whatever the state says; those before it are taken as
                they are.
            fresh: rerun every phase.

        Returns:
            What happened, failures included; only a wrong request raises.

        Raises:
            UsageError: there is no such phase, or `from_` comes after `until`.
            OnboardError: the root cannot be written, the state cannot be read, or a phase before
                `from_` never ran.
        """
        selected = self._select(until, from_)
        context.options.weights = not context.options.dry_run and any(
            phase.needs_weights for phase in selected
        )
        if context.options.dry_run:
            return _Run(context, self.observer, from_, fresh).run(selected)
        check_writable(context.root)
        with exclusive(context.work_dir, waiting=self.observer.waiting):
            return _Run(context, self.observer, from_, fresh).run(selected)

    def _select(self, until: str | None, from_: str | None) -> list[Phase]:
        names = [phase.name for phase in self.phases]
        for name in (until, from_):
            if name is not None and name not in names:
                raise UsageError(f"there is no phase {name!r}", hint=suggest(name, names))
        end = names.index(until) + 1 if until else len(names)
        if from_ in names[end:]:
            raise UsageError(
                f"the phase {from_} comes after {until}", hint=f"The order is {', '.join(names)}"
            )
        return list(self.phases[:end])


class _Run:
    """One pass over the phases of a model, with its lock held."""

    def __init__(
        self, context: RunContext, observer: Observer, from_: str | None, fresh: bool
    ) -> None:
        self.context = context
        self.observer = observer
        self.versions = current_versions()
        self.state = _fresh_state(context) if fresh else _load_state(context)
        context.files.written, context.files.remember = self.state.written, self._save_state
        self.state.versions = self.versions
        self.from_ = from_
        self.forced = fresh
        self.keep_earlier = from_ is not None
        self.input_hash = ""
        self.executing = False
        self.later: Sequence[Phase] = ()
        self.judged: dict[str, tuple[PhaseRecord, PhaseOutcome]] = {}
        context.files.held = not context.options.dry_run

    def run(self, phases: Sequence[Phase]) -> RunOutcome:
        """Run or skip each phase until one fails."""
        outcome = RunOutcome(self.context.model, self.context.root)
        for index, phase in enumerate(phases):
            self.later = phases[index + 1 :]
            if not phase.judges_input:
                self._release()
            if phase.name == self.from_:
                self.forced, self.keep_earlier = True, False
            result = self._step(phase)
            outcome.phases.append(result)
            self.observer.finished(result)
            if outcome.status != "done":
                return outcome
        self._release()
        return outcome

    def _step(self, phase: Phase) -> PhaseOutcome:
        started = time.monotonic()
        self.input_hash, self.executing = "", False
        try:
            result = self._skip_or_run(phase)
        except OnboardError as error:
            result = PhaseOutcome(phase.name, "failed", error=str(error), exception=error)
        except KeyboardInterrupt as error:
            result = PhaseOutcome(phase.name, "interrupted", error="interrupted", exception=error)
        # A defect of ours must not cost the record of the run; the command line reports it as an
        # internal error.
        except Exception as error:
            unfit = unfit_package(error)
            text = unfit or f"internal error in {phase.name}: {type(error).__name__}: {error}"
            said = " ".join(str(text).split())
            result = PhaseOutcome(phase.name, "failed", error=said, exception=unfit or error)
        result.seconds = 0.0 if result.status == "skipped" else time.monotonic() - started
        if self.executing:
            self._record(phase, result)
        return result

    def _skip_or_run(self, phase: Phase) -> PhaseOutcome:
        record = self.state.phases.get(phase.name)
        if self.keep_earlier:
            return self._keep(phase, record)
        if self.context.options.dry_run:
            return self._rehearse(phase, record)
        self.input_hash = hash_inputs(phase.inputs(self.context), self.versions)
        if record is not None and self._is_current(phase, record):
            return _skipped(phase, record, self._unchanged(phase, record))
        if record is not None and not self.forced:
            self._refuse_to_overwrite_edits(phase, record)
        return self._execute(phase)

    def _execute(self, phase: Phase) -> PhaseOutcome:
        self.executing, self.context.doing = True, self.observer.doing
        self.context.files.replacing = phase.name == self.from_
        self.observer.started(phase.name)
        if not phase.starts_programs and any(each.starts_programs for each in self.later):
            self.context.warm_up()
        if not self.context.files.held:
            self._save({phase.name: PhaseRecord(status="running", input_hash=self.input_hash)})
        result: PhaseResult = phase.run(self.context)
        return PhaseOutcome(phase.name, "done", summary=result.summary, artifacts=result.artifacts)

    def _rehearse(self, phase: Phase, record: PhaseRecord | None) -> PhaseOutcome:
        """Run a phase whose writes are only collected; one that reads what only a real run makes is
        planned.
        """
        try:
            self.input_hash = hash_inputs(phase.inputs(self.context), self.versions)
            if record is not None and self._is_current(phase, record):
                return _skipped(phase, record, self._unchanged(phase, record))
            return self._execute(phase)
        except FileNotFoundError as error:
            missing = Path(error.filename or "")
            if not missing.is_relative_to(self.context.root):
                raise
            return PhaseOutcome(
                phase.name, "planned", summary=f"would run once {missing.name} is there"
            )

    def _keep(self, phase: Phase, record: PhaseRecord | None) -> PhaseOutcome:
        if record is None or record.status != "done" or not self._artifacts_exist(record):
            raise OnboardError(
                f"the phase {phase.name} has no complete result yet", hint="Run without --from"
            )
        return _skipped(phase, record, f"kept, as --from {self.from_} asks")

    def _is_current(self, phase: Phase, record: PhaseRecord) -> bool:
        return (
            not self.forced
            and record.status == "done"
            and record.input_hash == self.input_hash
            and self._artifacts_exist(record)
            and not (
                self._edited(record)
                - phase.editable
                - phase.merged
                - self._by_relatives(phase, record)
            )
        )

    def _by_relatives(self, phase: Phase, record: PhaseRecord) -> set[str]:
        """Return the shared artifacts that the run of some model left as they are."""
        paths = {
            name: self.context.root / record.artifacts[name].path
            for name in phase.shared & record.artifacts.keys()
        }
        return {name for name, path in paths.items() if not self.context.files.is_users(path)}

    def _unchanged(self, phase: Phase, record: PhaseRecord) -> str:
        """Return why a phase is skipped, with the files outside the work folder that are a
        user's.
        """
        context = self.context
        paths = [
            context.root / item.path
            for name, item in record.artifacts.items()
            if name not in phase.merged
        ]
        kept = [
            path
            for path in paths
            if not path.is_relative_to(context.work_dir) and context.files.is_users(path)
        ]
        return "; ".join(["unchanged", *(context.kept(path, phase.name) for path in kept)])

    def _artifacts_exist(self, record: PhaseRecord) -> bool:
        return all(
            (self.context.root / artifact.path).exists() for artifact in record.artifacts.values()
        )

    def _edited(self, record: PhaseRecord) -> set[str]:
        return {
            name
            for name, artifact in record.artifacts.items()
            if artifact.sha256 is not None
            and self.context.files.digest(self.context.root / artifact.path)
            not in (None, artifact.sha256)
        }

    def _refuse_to_overwrite_edits(self, phase: Phase, record: PhaseRecord) -> None:
        """Stop for an edited artifact of the work folder; a user's other files are kept by
        `FileWriter.put`.
        """
        edited = sorted(self._edited(record) & phase.editable)
        paths = [record.artifacts[name].path for name in edited]
        if own := [
            path
            for path in paths
            if (self.context.root / path).is_relative_to(self.context.work_dir)
        ]:
            path = own[0]
            raise OnboardError(
                f"{path} was edited, and what {phase.name} made it from has changed since",
                hint=f"--from {phase.name} makes it anew; --from a later phase keeps the edits",
            )

    def _record(self, phase: Phase, outcome: PhaseOutcome) -> None:
        """Remember a phase that ran: at once, or once all that judge the input have passed."""
        if outcome.status == "interrupted":
            return
        record = PhaseRecord(
            status="done" if outcome.status == "done" else "failed",
            input_hash=self.input_hash,
            seconds=round(outcome.seconds, 3),
            summary=outcome.summary,
            error=outcome.error,
            artifacts={name: self._artifact(path) for name, path in outcome.artifacts.items()},
        )
        if self.context.files.held:
            self.judged[phase.name] = (record, outcome)
        else:
            self._save({phase.name: record})
            self._log(outcome)

    def _release(self) -> None:
        """Write what was held back. The state says "running" meanwhile, so that a half-written spec
        is not an edit.
        """
        files = self.context.files
        if not files.held:
            return
        files.held = False
        self._save({name: PhaseRecord(status="running", input_hash="") for name in self.judged})
        files.release()
        self._save({name: record for name, (record, _) in self.judged.items()})
        for _, outcome in self.judged.values():
            self._log(outcome)

    def _artifact(self, path: str) -> Artifact:
        return Artifact(path=path, sha256=self.context.files.digest(self.context.root / path))

    def _save(self, records: dict[str, PhaseRecord]) -> None:
        if records and not self.context.options.dry_run:
            self.state.phases |= records
            self._save_state()

    def _save_state(self) -> None:
        """Write the state, but not while writes are held back: it is written before they are."""
        if not self.context.files.held and not self.context.options.dry_run:
            self.context.files.write(self.context.artifact(STATE_FILE), self.state.text())

    def _log(self, outcome: PhaseOutcome) -> None:
        title = f"{outcome.name}: {outcome.status} in {outcome.seconds:.1f} s"
        self.context.worklog.append(title, outcome.story(), **outcome.document())


def _fresh_state(context: RunContext) -> RunState:
    """Return a state of which nothing is known but the files that earlier runs wrote."""
    try:
        written = _load_state(context).written
    except OnboardError:  # unreadable, which is what starting over is for
        written = {}
    return RunState(model=context.model, written=written)


def _load_state(context: RunContext) -> RunState:
    """Return the model's state; that of a model whose folder is gone counts as none."""
    state = RunState.load(context.work_dir, context.model)
    if state.model == context.model:
        return state
    if _may_have(context.work_dir, context.model):
        return RunState(model=context.model)
    raise OnboardError(f"{context.work_dir} was taken by {state.model} meanwhile", hint="Run again")


def _skipped(phase: Phase, record: PhaseRecord, why: str) -> PhaseOutcome:
    artifacts = {name: artifact.path for name, artifact in record.artifacts.items()}
    return PhaseOutcome(phase.name, "skipped", summary=why, artifacts=artifacts)
