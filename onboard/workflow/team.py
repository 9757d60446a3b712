"""Who is asked when a phase is stuck, and what of the answer is kept: what has passed the allow-list
and the tests, behind the same walls as a model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from onboard.agents.answers import RunAnswer, read_answer
from onboard.agents.assignment import Assignment
from onboard.agents.difference import as_requested, class_text, repair_task
from onboard.agents.patch import diff_of
from onboard.agents.proposal import ported_block, propose
from onboard.agents.reference import ops_reference
from onboard.agents.reviewing import asked_review
from onboard.agents.role_runs import Records, RoleRun
from onboard.agents.role_settings import Builtin, RoleName
from onboard.agents.roles import (
    PORTER,
    REPAIRER,
    REVIEWER,
    RUNNER,
    Call,
    ChecklistItem,
    PortTask,
    ReviewTask,
    Role,
    RunTask,
    Task,
)
from onboard.agents.workspace import Verdict, Workspace
from onboard.analysis.spec import ModelSpec
from onboard.errors import OnboardError, UntranslatableError
from onboard.render import code, fenced
from onboard.vetting.model_text import registered, vet_model_text
from onboard.workflow.phase import RunContext
from onboard.workflow.remote import client as remote
from onboard.workflow.remote.agreed import file_of
from onboard.workflow.remote.vet import vet_model_file

SPEC = "spec.yaml"
_END_OF_LOG = 4000
MENDED = "mended by the repairer"
_OF_SPEC = {"blocks", "layer_kinds", "traits", "tricky"}
"""What a proposal may change of a spec: what was found, not which model it is."""
Check = Callable[[str], str]
"""A model file's text -> what is wrong with it; "" where nothing is."""


def is_asked(context: RunContext, role: RoleName) -> bool:
    """Whether somebody else than the rules plays a role; nobody is asked in a dry run."""
    return not isinstance(context.options.agents.of(role), Builtin) and not context.options.dry_run


@dataclass(frozen=True)
class Request:
    """A change that a reviewer asks for."""

    text: str
    """In the reviewer's words: data, as any block's source."""
    path: str = ""
    line: int = 0
    """What it is about; "" and 0: it does not say."""
    block: str = ""
    """The class that has that line."""


def repaired(
    context: RunContext,
    text: str,
    problem: str,
    *,
    more: Check = lambda _: "",
    request: Request | None = None,
) -> str | None:
    """Return the model file's text as the repairer has mended it; None where nobody is asked.

    Args:
        context: the model's run.
        text: the model file's, which is wrong.
        problem: what a proof, a test or the review says.
        more: what has to pass beside the proof.
        request: the change that is asked for, where the file is right as it is.

    Raises:
        OnboardError: no proposal passed within the limits.
    """
    if not is_asked(context, "repairer"):
        return None
    model = f"models/modeling_{context.spec.family}.py"
    theirs = modeling_code(context)
    spec = context.files.read(context.artifact(SPEC))
    files = {model: text, SPEC: spec, f"reference/modeling_{context.spec.family}.py": theirs}
    judge = _Judge(context, model, more)
    task = repair_task(context.spec, (model, SPEC), text, theirs, problem)
    if request is not None:
        task = as_requested(task, request.text, request.block, text, theirs)
    workspace = Workspace(files, frozenset({model, SPEC}), judge)
    assignment = assigned(context, REPAIRER, task, workspace)
    with noted(context, assignment):
        run = propose(assignment, problem)
    if SPEC in run.files:
        context.files.write(context.artifact(SPEC), run.files[SPEC])
    return judge.texts[_key(run.files)]


def requested(
    context: RunContext, text: str, request: Request, *, more: Check = lambda _: ""
) -> str | None:
    """Return the model file's text with the change that a reviewer asks for, as the repairer has made
    it; None where nobody is asked.

    Args:
        context: the model's run.
        text: the model file's.
        request: what is asked for.
        more: what has to pass beside the proof.

    Raises:
        OnboardError: no proposal passed within the limits.
    """
    place = f" at {request.path}:{request.line}" if request.path else ""
    problem = f"a reviewer asks for a change{place}"
    return repaired(context, text, problem, more=more, request=request)


def judged(context: RunContext, text: str, more: Check) -> Verdict:
    """Return what the allow-list, the proof and `more` say of a text of the model file."""
    model = f"models/modeling_{context.spec.family}.py"
    return _Judge(context, model, more)({model: text})


def ported(context: RunContext, error: UntranslatableError) -> str | None:
    """Return the model file in which the block that has no translation is the porter's; None where
    nobody is asked, or the block is in no code that could be shown.

    Raises:
        OnboardError: no block passed within the limits.
    """
    theirs = modeling_code(context) if is_asked(context, "porter") and error.block else ""
    source = class_text(theirs, error.block)
    if not source:
        return None
    spec = context.spec
    calls = remote.in_walls(context, "recorded", spec=spec.to_yaml(), name=error.block)
    task = PortTask(
        model=context.model,
        block=error.block,
        problem=error.message,
        source=source,
        calls=[Call.model_validate(_plain(call)) for call in calls],
        ops=ops_reference(),
    )
    judge = _PortJudge(context)
    files = {f"reference/modeling_{spec.family}.py": theirs}
    assignment = assigned(context, PORTER, task, Workspace(files, judge=judge))
    run = assignment.open()
    run.before = error.message
    with noted(context, assignment):
        answer = ported_block(assignment, error.block)
        run.diff = diff_of({error.block: source}, {error.block: answer.block.text})
        assignment.records.save()
    return judge.text


def _plain(call: Any) -> Any:
    return call if isinstance(call, dict) else call.model_dump()


def reviewed(
    context: RunContext, files: dict[str, str], checklist: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return the items that an agent fails, with its evidence.

    Args:
        context: the model's run.
        files: the model file and the tests, by path.
        checklist: the items' titles.

    Raises:
        OnboardError: no answer had a verdict on each item within the limits.
    """
    model, tests = files
    items = [ChecklistItem(id=id, title=title) for id, title in checklist.items()]
    task = ReviewTask(model=context.model, model_file=model, test_file=tests, checklist=items)
    assignment = assigned(context, REVIEWER, task, Workspace(files))
    with noted(context, assignment):
        found = asked_review(assignment, checklist)
    return {item.id: item.evidence for item in found if item.verdict == "FAIL"}


def judged_text(context: RunContext, run: Mapping[str, Any], log: Path) -> dict[str, Any] | None:
    """Return what the runner says of a run's texts; None where nobody is asked.

    Raises:
        OnboardError: no answer was of the schema within the limits.
    """
    if not is_asked(context, "runner"):
        return None
    pairs = [(str(each["prompt"] or ""), str(each["output"])) for each in run["prompts"]]
    end = log.read_text(encoding="utf-8", errors="replace")[-_END_OF_LOG:]
    task = RunTask(
        model=context.model,
        config=context.read_json("registration.json").get("config", ""),
        world_size=run.get("settings", {}).get("world_size", 1),
        description=run["description"],
        status=run["status"],
        pairs=pairs,
        log=end,
        learnt=list(run.get("facts", [])),
    )
    assignment = assigned(context, RUNNER, task, Workspace({}))
    with noted(context, assignment):
        answer = assignment.answered(
            lambda reply: read_answer(reply.text, RunAnswer), lambda found: found.verdict
        )
    return answer.model_dump()


def assigned(context: RunContext, role: Role, task: Task, workspace: Workspace) -> Assignment:
    """Return a role's assignment in a model's run."""
    return Assignment(
        role,
        task,
        context.options.agents.of(role.name),
        workspace,
        Records.load(context.work_dir, context.files.write),
        context.options.unsandboxed,
        context.doing,
        context.root,
    )


@contextmanager
def noted(context: RunContext, assignment: Assignment) -> Iterator[None]:
    """Log a role's run once it has ended, well or not."""
    try:
        yield
    finally:
        note(context, assignment.open())


def note(context: RunContext, run: RoleRun) -> None:
    """Append to the worklog what a role has done, what it took, and the diff with both errors: once,
    however often a phase that is repeated comes to it again.
    """
    if run.status not in ("done", "failed"):
        return
    about = "about " if run.estimated else ""
    lines = [
        f"- Asked: {run.about}",
        f"- Attempts: {run.attempts}; {about}{run.tokens:,} tokens, {run.cost:.2f} dollars, {run.seconds:.1f} s",
        f"- Transcript: `{run.transcript}`",
        f"- Before: {run.before}",
        f"- After: {run.after}",
        *(f"- Not taken: {code(why)}" for why in run.refusals),
    ]
    diff = f"\n{fenced(run.diff, 'diff')}" if run.diff else ""
    context.worklog.append(
        f"{run.role} ({run.back_end}): {run.status}",
        "\n".join(lines) + diff,
        key=f"{run.role} {run.input_hash} {run.status}",
        **run.document(),
    )


def modeling_code(context: RunContext) -> str:
    """Return the text of the modeling code that a spec is made from, without running it."""
    spec = context.spec
    if spec.repository is not None:
        return (context.source.files() / file_of(spec.hf_module)).read_text(encoding="utf-8")
    found = find_spec(spec.hf_module)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).read_text(encoding="utf-8")


@dataclass
class _Judge:
    """Vets and tests a proposal: the allow-list here, whatever runs it behind walls."""

    context: RunContext
    model: str
    more: Check
    texts: dict[str, str] = field(default_factory=dict)
    """The model files that have passed, by what was proposed."""

    def __call__(self, files: Mapping[str, str]) -> Verdict:
        try:
            spec = self._spec(files)
            text = self._text(files, spec)
            vet(text, spec)
            worst = proven(self.context, text, spec)
            if wrong := self.more(text):
                return Verdict(False, wrong)
        except OnboardError as error:
            return Verdict(False, error.message)
        self.texts[_key(files)] = text
        return Verdict(True, worst)

    def _spec(self, files: Mapping[str, str]) -> ModelSpec:
        old = self.context.spec
        if SPEC not in files:
            return old
        new = ModelSpec.from_yaml(files[SPEC])
        ours, theirs = (each.model_dump(exclude=_OF_SPEC) for each in (old, new))
        if other := sorted(key for key in ours if ours[key] != theirs[key]):
            raise OnboardError(f"{SPEC}: {other[0]} is not yours to change")
        return new

    def _text(self, files: Mapping[str, str], spec: ModelSpec) -> str:
        if self.model in files:
            return files[self.model]
        made = remote.in_walls(self.context, "generate", spec=spec.to_yaml())
        return str(made.text)


@dataclass
class _PortJudge:
    """Has the generator go on with a block that was written anew, and proves what it makes against
    the code as it was.
    """

    context: RunContext
    text: str = ""
    """The model file that passed last."""

    def __call__(self, files: Mapping[str, str]) -> Verdict:
        ((name, block),) = files.items()
        spec = self.context.spec
        try:
            text = remote.ported(self.context, name, block)
            vet(text, spec)
            worst = proven(self.context, text, spec)
        except OnboardError as error:
            return Verdict(False, error.message)
        self.text = text
        return Verdict(True, worst)


def vet(text: str, spec: ModelSpec) -> None:
    """Raise `OnboardError` unless a model file passes the allow-list, and registers the classes of
    its spec and no others.
    """
    if spec.repository is not None:
        vet_model_file(text, spec)
        return
    vet_model_text(text)
    if registered(text) != {spec.config_class, spec.architecture}:
        raise OnboardError("the model file registers other classes than its spec has")


def proven(context: RunContext, text: str, spec: ModelSpec) -> str:
    """Prove a model file behind walls; return what that says."""
    worst = remote.in_walls(context, "check", spec=spec.to_yaml(), text=text)
    return f"every block, and the logits, are transformers': largest error {worst:.1e}"


def _key(files: Mapping[str, str]) -> str:
    return repr(sorted(files.items()))
