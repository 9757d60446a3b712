"""The text of a pull request: every item of its checklist with what shows it, and what the run and
the tests printed, whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from onboard.content import content_path
from onboard.render import render
from onboard.untrusted.bounds import YAML_BYTES, read_text
from onboard.untrusted.visible_text import escaped
from onboard.untrusted.yaml_text import load_yaml
from onboard.workflow.phase import RunContext
from onboard.workflow.phases.test import CODE
from onboard.workflow.reporting.branch_files import listed_files
from onboard.workflow.reporting.human_notes import human_notes
from onboard.workflow.reporting.item_records import Found, State, inapplicable, reviewed_items
from onboard.workflow.reporting.markdown_parts import MOST_CHARACTERS, numbered
from onboard.workflow.reporting.provenance import onboard_command
from onboard.workflow.reporting.report_view import (
    about,
    active_facts,
    found_artifacts,
    review_groups,
    short_count,
)
from onboard.workflow.reporting.run_records import RECORDS
from onboard.workflow.reporting.tested_commit import Pushed, Tested

BODY, UPDATE = "pull_request/pull_request.md.j2", "pull_request/update.md.j2"
ITEMS = "pull_request/items.yaml"
TEMPLATES = (BODY, UPDATE, "pull_request/outputs.md.j2", ITEMS)
NOTHING: Mapping[str, dict[str, Any]] = MappingProxyType({})
_MOST_LINES = 8
"""Lines of evidence that stand beside an item; more are in a section of their own, too."""


@dataclass(frozen=True)
class Item:
    """An item of the checklist."""

    title: str
    state: State
    lines: list[str]


@dataclass(frozen=True)
class Section:
    """Items that belong together."""

    title: str
    items: list[Item]


def body(
    context: RunContext,
    pushed: Pushed | None = None,
    *,
    records: Mapping[str, dict[str, Any]] = NOTHING,
    most: int = MOST_CHARACTERS,
) -> list[str]:
    """Return the text of a model's pull request, in parts that GitHub takes: the first is the pull
    request's own, each further one a comment's.

    Args:
        context: the model's run, of whose artifacts everything is taken.
        pushed: the commit that it is about; None: there is none yet.
        records: what takes the place of an artifact by its name ("tests", "run"), made anew with
            that commit. Its `files` has the sha256 of the files that it was made with, by path.
        most: characters of a part.
    """
    tested = Tested(context, {**found_artifacts(context), **records}, pushed)
    text = render(BODY, context.root, **_values(tested))
    return numbered(text, "Text of this pull request", most)


def update_comment(
    context: RunContext,
    pushed: Pushed,
    change: str,
    *,
    records: Mapping[str, dict[str, Any]] = NOTHING,
    most: int = MOST_CHARACTERS,
) -> list[str]:
    """Return the comment on an update: what changed, all prompts and outputs, and what the tests
    printed, in parts that GitHub takes. See `body` for the others.
    """
    tested = Tested(context, {**found_artifacts(context), **records}, pushed)
    text = render(UPDATE, context.root, change=change, **_printed(tested), **_about(tested))
    return numbered(text, "Runs of this update", most)


def sections(tested: Tested) -> list[Section]:
    """Return the checklist with what shows each item."""
    path = content_path("templates", ITEMS, root=tested.context.root)
    listed = load_yaml(read_text(path, YAML_BYTES), ITEMS)
    return [
        Section(each["section"], [_item(tested, item) for item in each["items"]]) for each in listed
    ]


def _item(tested: Tested, item: dict[str, Any]) -> Item:
    return Item(item["title"], *_found(tested, item))


def _found(tested: Tested, item: dict[str, Any]) -> Found:
    if "review" in item:
        return reviewed_items(tested, item["review"])
    if "inapplicable" in item:
        return inapplicable(item["inapplicable"])
    return RECORDS[item["record"]](tested)


def _values(tested: Tested) -> dict[str, Any]:
    context, found = tested.context, tested.found
    spec, shown = context.spec, sections(tested)
    items = [item for section in shown for item in section.items]
    return {
        "name": found["registration"].get("name", context.model),
        "spec": spec,
        "parameters": _parameters(context),
        "sections": shown,
        "most_lines": _MOST_LINES,
        "long": [item for item in items if len(item.lines) > _MOST_LINES],
        "done": sum(item.state == "shown" for item in items),
        "inapplicable": sum(item.state == "inapplicable" for item in items),
        "total": len(items),
        "files": listed_files(context, found["registration"]),
        "about": about(found["run"]),
        "notes": human_notes(spec, found),
        "code": own_code(context),
        "review": review_groups(found["review"]),
        **_printed(tested),
        **_about(tested),
    }


def _about(tested: Tested) -> dict[str, Any]:
    return {"pushed": tested.pushed, "differences": tested.differences() if tested.pushed else []}


def _printed(tested: Tested) -> dict[str, Any]:
    """Return what run and tests printed, and the commands that repeat them."""
    run, tests = tested.found["run"], tested.found["tests"]
    prompts = run.get("runs", {}).get("full", {}).get("prompts", [])
    texts = [str(prompt[key] or "") for prompt in prompts for key in ("prompt", "output")]
    texts.append(tests.get("output", ""))
    return {
        "prompts": prompts,
        "command": run.get("command", ""),
        "test_command": tests.get("command", ""),
        "test_output": tests.get("output", ""),
        "control": any(escaped(text) != text for text in texts),
    }


def _parameters(context: RunContext) -> str:
    spec = context.spec
    counted = [(short_count(spec.num_parameters), "parameters"), *active_facts(spec)]
    return ", ".join(f"{value} {name}" for value, name in counted if value)


def own_code(context: RunContext) -> dict[str, Any] | None:
    """Return the files that the model brings, which were trusted, where they are fetched from, and
    the command that puts them where tests read them.

    They are somebody else's, and no part of the branch.
    """
    spec = context.spec
    if spec.repository is None:
        return None
    trusting = replace(
        context, options=context.options.model_copy(update={"trust_remote_code": True})
    )
    return {
        "files": spec.repository.files,
        "repository": context.model if spec.revision else context.model.rsplit("/", 1)[-1],
        "revision": spec.revision,
        "folder": context.relative(context.artifact(CODE)),
        "command": f"{onboard_command(trusting)} --until test",
    }
