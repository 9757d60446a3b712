"""pull_request: a local branch with the model's files and registry lines, and the text to open a
pull request with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from onboard.content import content_path
from onboard.git import BranchUpdate, Checkout, branch_name
from onboard.registry import HEADER, RegistryEntry, load_entries
from onboard.registry_text import insert_entry, set_fields
from onboard.render import render
from onboard.workflow.phase import Phase, PhaseResult, RunContext
from onboard.workflow.phases.cookbook import notebook_path
from onboard.workflow.phases.register import ARTIFACT as REGISTRATION
from onboard.workflow.phases.report import SHARED
from onboard.workflow.phases.run import ARTIFACT as RUN
from onboard.workflow.phases.test import CODE
from onboard.workflow.registry_results import load_results
from onboard.workflow.reporting.human_notes import human_notes
from onboard.workflow.reporting.provenance import onboard_command
from onboard.workflow.reporting.report_view import (
    ARTIFACTS,
    about,
    active_facts,
    found_artifacts,
    review_groups,
    review_text,
    short_count,
)
from onboard.workflow.reporting.support_matrix import empty_matrix, updated_matrix

TEMPLATE = "pull_request/pull_request.md.j2"
VERDICT = {"status", "tested", "model_file"}
"""Fields of an entry that tell what came of its run."""
REGISTRY, MATRIX = "registry/models.yaml", "registry/supported_models.md"


class PullRequest(Phase):
    """Writes `pull_request.md` and, in a git checkout, the branch `onboard/<model>`."""

    name = "pull_request"

    def inputs(self, context: RunContext) -> dict[str, Any]:
        """Depend on the files of the branch and on what the text says."""
        return {
            "templates": [
                context.files.digest(content_path("templates", name, root=context.root))
                for name in (TEMPLATE, *SHARED)
            ],
            "files": {
                path: context.files.digest(context.root / path) for path in own_files(context)
            },
            "artifacts": context.digest("spec.yaml", *(f"{name}.json" for name in ARTIFACTS)),
        }

    def run(self, context: RunContext) -> PhaseResult:
        """Write the text, then the branch; say so when the root is no git checkout."""
        path = context.artifact("pull_request.md")
        context.files.write(path, render(TEMPLATE, context.root, **template_values(context)))
        artifacts = {"pull_request": context.relative(path)}
        if context.options.dry_run:
            return PhaseResult(artifacts, "a dry run makes no branch")
        checkout = Checkout.find(context.root)
        if checkout is None:
            return PhaseResult(
                artifacts, f"{context.root} is not a git checkout: no branch, only the text"
            )
        return PhaseResult(artifacts, describe(commit_branch(context, checkout)))


def commit_branch(context: RunContext, checkout: Checkout) -> BranchUpdate:
    """Commit the model's files, and its own lines of the shared ones, on the model's branch."""
    registration = context.read_json(REGISTRATION)
    branch = branch_name(registration["config_id"])
    entry = RegistryEntry.model_validate(registration["entry"])
    entry = next((known for known in load_entries(context.root) if known.name == entry.name), entry)
    files = {path: context.files.read(context.root / path) for path in own_files(context)}
    verdict = {
        key: str(value)
        for key, value in entry.model_dump(include=VERDICT, exclude_defaults=True).items()
    }
    entries = insert_entry(checkout.read(REGISTRY, branch) or HEADER, entry)
    for member in registration.get("members", []):
        entries = insert_entry(entries, RegistryEntry.model_validate(member["entry"]))
    files[REGISTRY] = set_fields(entries, entry.name, verdict)
    files[MATRIX] = updated_matrix(
        checkout.read(MATRIX, branch) or empty_matrix(), context, load_results(context.root)
    )
    subject = f"Onboard {' '.join(registration['name'].split())}"
    body = f"Model file of {context.spec.architecture}, its equivalence tests, registry entry and cookbook."
    return checkout.commit(branch, files, f"{subject}\n\n{body}")


def own_files(context: RunContext) -> list[str]:
    """Return the files under the root that are this model's (and its family's) alone."""
    family = context.spec.family
    paths = [
        f"models/modeling_{family}.py",
        f"tests/equivalence/test_{family}_modeling.py",
        context.read_json(REGISTRATION)["config"],
        context.relative(notebook_path(context)),
        *(member["config"] for member in context.read_json(REGISTRATION).get("members", [])),
    ]
    return [path for path in paths if context.files.exists(context.root / path)]


def describe(update: BranchUpdate) -> str:
    """Return one line on the branch."""
    if update.status == "checked out":
        return f"the branch {update.branch} is checked out and was left alone: commit the files there yourself"
    note = (
        f", by {update.identity}, as git has no identity here" if update.identity_is_neutral else ""
    )
    return f"branch {update.branch} {update.status} at {update.commit[:12]}{note}"


def template_values(context: RunContext) -> dict[str, Any]:
    """Return everything that the text shows."""
    spec, registration, run = context.spec, context.read_json(REGISTRATION), context.read_json(RUN)
    tests, review = context.read_json("tests.json"), context.read_json("review.json")
    full = run["runs"]["full"]
    return {
        "name": registration["name"],
        "spec": spec,
        "parameters": ", ".join(
            f"{value} {name}"
            for value, name in [
                (short_count(spec.num_parameters), "parameters"),
                *active_facts(spec),
            ]
            if value
        ),
        "checklist": checklist(tests, review, run),
        "files": [
            *((path, "") for path in own_files(context)),
            (REGISTRY, _entries(registration)),
            (MATRIX, "one row a table"),
        ],
        "about": about(run),
        "notes": human_notes(spec, found_artifacts(context)),
        "code": own_code(context),
        "prompts": full["prompts"],
        "command": run["command"],
        "test_command": tests["command"],
        "test_output": tests["output"],
        "review": review_groups(review),
    }


def own_code(context: RunContext) -> dict[str, Any] | None:
    """Return the files that the model brings, which were trusted, and the command that puts them
    where tests read them.

    They are somebody else's, and no part of the branch.
    """
    if context.spec.repository is None:
        return None
    trusting = replace(
        context, options=context.options.model_copy(update={"trust_remote_code": True})
    )
    return {
        "files": context.spec.repository.files,
        "folder": context.relative(context.artifact(CODE)),
        "command": f"{onboard_command(trusting)} --until test",
    }


def _entries(registration: dict[str, Any]) -> str:
    members = len(registration.get("members", []))
    return (
        f"one entry, and {members} of its family that nobody has tried" if members else "one entry"
    )


def _beside_transformers(run: dict[str, Any]) -> bool:
    comparison = run["comparison"]
    return comparison["agrees"] and not comparison["reference"].startswith("none")


def checklist(
    tests: dict[str, Any], review: dict[str, Any], run: dict[str, Any]
) -> list[tuple[bool, str]]:
    """Return what has to hold before merging, as (holds, text)."""
    full = run["runs"]["full"]
    failed = [test for test in tests["tests"] if test["status"] == "failed"]
    passed = sum(test["status"] == "passed" for test in tests["tests"])
    text = full["text"]
    return [
        (not failed and passed > 0, f"equivalence tests: {passed} passed, {len(failed)} failed"),
        (
            review["verdict"] == "PASS",
            f"review of {len(review['items'])} items: {review_text(review)}",
        ),
        (full["status"] == "success", f"full run from {run['config']}: {full['status']}"),
        (
            _beside_transformers(full),
            "logits and tokens are those of transformers on the same weights",
        ),
        (text["verdict"] == "equal", f"text {text['verdict']}: {text['reason']}"),
        (
            full["cuda_graphs"]["used"],
            f"CUDA graphs {'used' if full['cuda_graphs']['used'] else 'not used'}",
        ),
    ]
