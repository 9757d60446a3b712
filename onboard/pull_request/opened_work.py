"""From the words of a command to the work on a pull request."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from onboard.errors import UsageError
from onboard.git import Checkout, branch_name
from onboard.pull_request.cycle import PullRequestWork, Tell
from onboard.pull_request.forge.access import find_access
from onboard.pull_request.forge.github_api import Forge
from onboard.pull_request.pull_journal import PullJournal
from onboard.pull_request.remote_branch import RemoteBranch, RemoteName, remote_named
from onboard.workflow.phase import RunOptions
from onboard.workflow.phase_runner import open_run
from onboard.workflow.phases.pull_request import shared_files
from onboard.workflow.phases.register import ARTIFACT as REGISTRATION

UPSTREAM = "upstream"


@dataclass(frozen=True)
class Place:
    """Which branch goes where; "": as at its opening, or as the repository says."""

    remote: str = ""
    """What is pushed to: `origin`."""
    upstream: str = ""
    """What has the target: `upstream`, where there is such a remote, or the one that is pushed to."""
    target: str = ""
    pause: float = 1.0
    """Seconds between two writes to GitHub, which it asks for."""


def open_work(
    model: str, root: Path, options: RunOptions, place: Place, tell: Tell
) -> PullRequestWork:
    """Return the work on a model's pull request; nothing is asked of GitHub but the target's name.

    Raises:
        UsageError: the model was not onboarded here, the root is in no checkout, or there is no
            token.
    """
    context = open_run(model, root, options)
    if not context.artifact(REGISTRATION).exists():
        raise UsageError(
            f"{model} was not onboarded under {context.root}",
            hint=f"Run onboard {model} --root {root}",
        )
    checkout = Checkout.find(context.root)
    if checkout is None:
        raise UsageError(f"{context.root} is in no git checkout", hint="Give another --root")
    journal = PullJournal.load(context.work_dir)
    origin = remote_named(checkout, place.remote or (journal.remote if journal else "origin"))
    upstream = _upstream(checkout, place.upstream or (journal.upstream if journal else ""), origin)
    access = find_access(upstream.host)
    forge = Forge(access, upstream.name, tell, pause=place.pause)
    branch = RemoteBranch(
        checkout=checkout,
        head=branch_name(context.read_json(REGISTRATION)["config_id"]),
        origin=origin,
        upstream=upstream,
        target=place.target or (journal.target if journal else forge.default_branch),
        access=access,
        merged=partial(shared_files, context),
    )
    return PullRequestWork(context, branch, forge, tell)


def _upstream(checkout: Checkout, name: str, origin: RemoteName) -> RemoteName:
    remotes = {each.name for each in checkout.repo.remotes}
    name = name or (UPSTREAM if UPSTREAM in remotes else "")
    return remote_named(checkout, name) if name else origin
