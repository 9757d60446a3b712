"""pull_request: a local branch with the model's files and registry lines, and the text to open a
pull request with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onboard.content import content_path
from onboard.git import BranchUpdate, Checkout, branch_name
from onboard.registry import HEADER, RegistryEntry, load_entries
from onboard.registry_text import insert_entry, set_fields
from onboard.workflow.phase import Phase, PhaseResult, RunContext
from onboard.workflow.phases.register import ARTIFACT as REGISTRATION
from onboard.workflow.phases.report import SHARED
from onboard.workflow.registry_results import load_results
from onboard.workflow.reporting.branch_files import MATRIX, MODELS, own_files
from onboard.workflow.reporting.pull_request_body import TEMPLATES, body
from onboard.workflow.reporting.report_view import ARTIFACTS
from onboard.workflow.reporting.support_matrix import empty_matrix, updated_matrix
from onboard.workflow.reporting.tested_commit import Pushed

VERDICT = {"status", "tested", "model_file"}
"""Fields of an entry that tell what came of its run."""


class PullRequest(Phase):
    """Writes `pull_request.md` and, in a git checkout, the branch `onboard/<model>`."""

    name = "pull_request"

    def inputs(self, context: RunContext) -> dict[str, Any]:
        """Depend on the files of the branch and on what the text says."""
        return {
            "templates": [
                context.files.digest(content_path("templates", name, root=context.root))
                for name in (*TEMPLATES, *SHARED)
            ],
            "files": {
                path: context.files.digest(context.root / path) for path in own_files(context)
            },
            "artifacts": context.digest("spec.yaml", *(f"{name}.json" for name in ARTIFACTS)),
        }

    def run(self, context: RunContext) -> PhaseResult:
        """Make the branch, then the text about its commit; say so when the root is no git
        checkout.
        """
        checkout = Checkout.find(context.root)
        if context.options.dry_run:
            return PhaseResult(_written(context, None), "a dry run makes no branch")
        if checkout is None:
            summary = f"{context.root} is not a git checkout: no branch, only the text"
            return PhaseResult(_written(context, None), summary)
        update = commit_branch(context, checkout)
        is_ours = update.commit and update.status != "checked out"
        pushed = Pushed(update.commit) if is_ours else None
        return PhaseResult(_written(context, pushed), describe(update))


def _written(context: RunContext, pushed: Pushed | None) -> dict[str, str]:
    """Write the text, a file a part; return the artifacts by name. Parts of a longer text before
    are removed.
    """
    artifacts = {}
    if not context.options.dry_run:
        for old in context.work_dir.glob("pull_request_*.md"):
            old.unlink()
    for number, text in enumerate(body(context, pushed), 1):
        part = f"_{number}" if number > 1 else ""
        path = context.artifact(f"pull_request{part}.md")
        context.files.write(path, text)
        artifacts[f"pull_request{part}"] = context.relative(path)
    return artifacts


def commit_branch(context: RunContext, checkout: Checkout) -> BranchUpdate:
    """Commit the model's files, and its own lines of the shared ones, on the model's branch."""
    registration = context.read_json(REGISTRATION)
    branch = branch_name(registration["config_id"])
    files = {path: context.files.read(context.root / path) for path in own_files(context)}
    files |= shared_files(context, lambda path: checkout.read(path, branch))
    subject = f"Onboard {' '.join(registration['name'].split())}"
    body = f"Model file of {context.spec.architecture}, its equivalence tests, registry entry and cookbook."
    return checkout.commit(branch, files, f"{subject}\n\n{body}")


def shared_files(context: RunContext, read: Callable[[str], str | None]) -> dict[str, str]:
    """Return the files that all models add to, with the model's own lines put into what is there.

    Args:
        context: the model's run.
        read: path under the root -> what is there.
    """
    registration = context.read_json(REGISTRATION)
    entry = RegistryEntry.model_validate(registration["entry"])
    entry = next((known for known in load_entries(context.root) if known.name == entry.name), entry)
    verdict = {
        key: str(value)
        for key, value in entry.model_dump(include=VERDICT, exclude_defaults=True).items()
    }
    entries = insert_entry(read(MODELS) or HEADER, entry)
    for member in registration.get("members", []):
        entries = insert_entry(entries, RegistryEntry.model_validate(member["entry"]))
    matrix = updated_matrix(read(MATRIX) or empty_matrix(), context, load_results(context.root))
    return {MODELS: set_fields(entries, entry.name, verdict), MATRIX: matrix}


def describe(update: BranchUpdate) -> str:
    """Return one line on the branch."""
    if update.status == "checked out":
        return f"the branch {update.branch} is checked out and was left alone: commit the files there yourself"
    note = (
        f", by {update.identity}, as git has no identity here" if update.identity_is_neutral else ""
    )
    return f"branch {update.branch} {update.status} at {update.commit[:12]}{note}"
