"""Whether a branch may become a pull request: nothing that its evidence was made with is missing in
it, and it is nobody else's branch.
"""

from __future__ import annotations

from collections.abc import Iterable

from onboard.errors import OnboardError, UsageError
from onboard.pull_request.forge.github_api import Forge
from onboard.pull_request.remote_branch import RemoteBranch
from onboard.workflow.phase import RunContext
from onboard.workflow.reporting.branch_files import MATRIX, MODELS, own_files

_SHARED = (MODELS, MATRIX, "registry/results.jsonl")
"""Files that the runs of all models add to; a branch has its model's lines of them alone."""
_SHOWN = 3


def require_clean(context: RunContext, branch: RemoteBranch) -> None:
    """Raise `UsageError` unless the files of the model are as the branch has them, and nothing else
    that git keeps was changed by hand.
    """
    checkout, own = branch.checkout, own_files(context)
    stale = [
        path
        for path in own
        if checkout.read(path, branch.head) != context.files.read(context.root / path)
    ]
    if stale:
        raise UsageError(
            f"the working tree is dirty: {_some(stale)} differs from the branch {branch.head}",
            hint=f"Run onboard {context.model} again, which tests and commits it",
        )
    prefix = checkout.prefix.as_posix()
    known = {path if prefix == "." else f"{prefix}/{path}" for path in (*own, *_SHARED)}
    if changed := [path for path in checkout.changed() if path not in known]:
        raise UsageError(
            f"the working tree is dirty: {_some(changed)} was changed and is in no commit",
            hint="Commit or stash it: the tests would run with what the branch does not have",
        )


def require_own_head(forge: Forge, branch: RemoteBranch) -> None:
    """Raise `UsageError` where the head is the target, the default branch, or protected."""
    head = branch.head
    if head in (branch.target, forge.default_branch) or forge.is_protected(head):
        raise UsageError(
            f"{head} is a branch that others build on: no pull request comes from it",
            hint="Give another branch with --target",
        )


def require_commits(branch: RemoteBranch) -> None:
    """Raise `OnboardError` where the branch has nothing that its target has not."""
    if branch.commits() == 0:
        raise OnboardError(
            f"{branch.target} has all that {branch.head} has", hint="There is nothing to propose"
        )


def _some(paths: Iterable[str]) -> str:
    found = list(paths)
    more = f" (and {len(found) - _SHOWN} more)" if len(found) > _SHOWN else ""
    return f"{', '.join(found[:_SHOWN])}{more}"
