"""A change that an agent proposes, taken as far as the tests carry it."""

from __future__ import annotations

from contextlib import suppress

from onboard.agents.answers import PortAnswer, RepairAnswer, read_answer
from onboard.agents.assignment import Assignment
from onboard.agents.patch import diff_of, with_block, with_diff
from onboard.agents.refused import RefusedError
from onboard.agents.role_runs import RoleRun
from onboard.agents.workspace import Reply, Workspace
from onboard.vetting.model_text import MOST


def propose(assignment: Assignment, before: str) -> RoleRun:
    """Return the run whose `files` passed the tests.

    What an earlier run with the same inputs was left with is tested again, and nobody is asked.

    Args:
        assignment: the role; its workspace has a judge.
        before: what is wrong now.

    Raises:
        OnboardError: no proposal passed within the limits.
    """
    run = assignment.open()
    run.before = before

    def accept(reply: Reply) -> RoleRun:
        _keep(run, proposed(reply, assignment.workspace), assignment.workspace)
        return run

    if run.status == "done":
        with suppress(RefusedError):  # the tests have changed since: it is asked again
            return accept(Reply("", run.files))
        run.status = "running"
    return assignment.carry_out(run, accept)


def proposed(reply: Reply, workspace: Workspace) -> dict[str, str]:
    """Return the files that a reply changes: those that were edited, or what its answer says.

    Raises:
        RefusedError: it changes nothing, or what it may not change.
    """
    if foreign := sorted(reply.files.keys() - workspace.editable):
        mine = ", ".join(sorted(workspace.editable))
        raise RefusedError(f"{foreign[0]} was changed, and only {mine} may be")
    changed = reply.files or _of_answer(reply.text, workspace)
    real = {path: text for path, text in changed.items() if text != workspace.files[path]}
    if not real:
        raise RefusedError("the proposal changes nothing")
    for path, text in real.items():
        if len(text.encode(errors="surrogatepass")) > MOST:
            raise RefusedError(f"{path} is to have {len(text):,} letters, at most {MOST:,} may be")
    return real


def _of_answer(text: str, workspace: Workspace) -> dict[str, str]:
    answer = read_answer(text, RepairAnswer)
    if answer.diff is not None:
        return with_diff(workspace.files, answer.diff, workspace.editable)
    assert answer.block is not None
    path = next(path for path in sorted(workspace.editable) if path.endswith(".py"))
    return {path: with_block(workspace.files[path], answer.block.name, answer.block.text)}


def _keep(run: RoleRun, files: dict[str, str], workspace: Workspace) -> None:
    """Note files in a run's record once the tests pass with them; raise where they do not."""
    assert workspace.judge is not None
    verdict = workspace.judge(files)
    if not verdict.passed:
        raise RefusedError(f"the tests fail with it: {verdict.said}")
    run.files, run.after = files, verdict.said
    run.diff = diff_of(workspace.files, files)


def ported_block(assignment: Assignment, name: str) -> PortAnswer:
    """Return a porter's block, which the judge has passed.

    Raises:
        OnboardError: none passed within the limits.
    """
    judge = assignment.workspace.judge
    assert judge is not None
    said = ""

    def read(reply: Reply) -> PortAnswer:
        nonlocal said
        answer = read_answer(reply.text, PortAnswer)
        if answer.block.name != name:
            raise RefusedError(f"the block has to be {name}, not {answer.block.name}")
        verdict = judge({name: answer.block.text})
        if not verdict.passed:
            raise RefusedError(f"the proof fails with it: {verdict.said}")
        said = verdict.said
        return answer

    return assignment.answered(read, lambda _: said)
