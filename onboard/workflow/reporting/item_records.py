"""What shows each item of a pull request that follows from files, tests and review: lines, numbers
with their units, or what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from onboard.workflow.checkpoint.checkpoint_size import layer_kinds
from onboard.workflow.reporting.rounded_tests import rounded
from onboard.workflow.reporting.source_places import class_lines, source_place
from onboard.workflow.reporting.tested_commit import Tested

State = Literal["shown", "open", "inapplicable"]


class Found(NamedTuple):
    """What is known of an item."""

    state: State
    lines: list[str]
    """`file:line`, numbers, or why nothing is shown."""


def found(shown: bool, *lines: str) -> Found:
    """Return lines that show an item, or that say what is missing."""
    return Found("shown" if shown else "open", list(lines))


def inapplicable(why: str) -> Found:
    """Return why nothing can be shown of an item."""
    return Found("inapplicable", [why])


def reviewed_items(tested: Tested, ids: list[str]) -> Found:
    """Return the reviewer's evidence of some items of its checklist."""
    known = {item["id"]: item for item in tested.found["review"].get("items", [])}
    missing = [f"{id}: the review has no such item" for id in ids if id not in known]
    items = [known[id] for id in ids if id in known]
    lines = [f"{item['id']}: {line}" for item in items for line in item["evidence"]]
    bare = [f"{item['id']}: {item['verdict']}" for item in items if not item["evidence"]]
    holds = not missing and all(item["verdict"] != "FAIL" for item in items)
    return found(holds, *lines, *bare, *missing)


def memory(tested: Tested) -> Found:
    """How large the model is, and whether it fits."""
    gather = tested.found["gather"]
    if not {"parameters", "bytes", "size_from"} <= gather.keys():
        return found(False, "no size is recorded")
    size = f"{gather['parameters']:,} parameters, {gather['bytes']:,} bytes ({gather['size_from']})"
    return found(True, size, str(gather.get("memory", "")))


def source(tested: Tested) -> Found:
    """The file and line of the model's class, and the hash of the source."""
    spec = tested.context.spec
    own = next((block for block in spec.blocks if block.class_name == spec.architecture), None)
    place = source_place(spec, own.source) if own else spec.hf_module
    of = f"transformers {spec.transformers_version}" if spec.repository is None else "repository"
    lines = [f"{place}: {spec.architecture} ({of})", f"sha256 of the source {spec.source_hash}"]
    return found(True, *lines, *([f"revision {spec.revision}"] if spec.revision else []))


def existing(tested: Tested) -> Found:
    """Which model file was there before."""
    survey = tested.found["survey"]
    return found("plan" in survey, str(survey.get("plan", "no survey is recorded")))


def family(tested: Tested) -> Found:
    """Which models of the family are registered, and which are not."""
    survey = tested.found["survey"]
    if "family" not in survey:
        return found(False, "no survey is recorded")
    names = {name: survey.get(name) or [] for name in ("registered", "missing")}
    lines = [f"{name}: {', '.join(listed) or 'none'}" for name, listed in names.items()]
    return found(True, *lines, *([survey["note"]] if survey.get("note") else []))


def traits(tested: Tested) -> Found:
    """Each trait with its evidence."""
    listed = tested.context.spec.traits
    lines = [f"{name}: {trait.value} ({trait.evidence})" for name, trait in listed.items()]
    return found(bool(lines), *(lines or ["no trait was found"]))


def towers(tested: Tested) -> Found:
    """What a multimodal model leaves to transformers."""
    paths = tested.context.spec.eager
    if not paths:
        return inapplicable("the model reads text only")
    return found(True, *(f"{path}: transformers' own module, run eagerly" for path in paths))


def blocks(tested: Tested) -> Found:
    """The error of every block, with its class and lines."""
    return _tests(tested, "block")


def layers(tested: Tested) -> Found:
    """The error of a layer of each kind."""
    kinds = [kind for kind in layer_kinds(tested.context.spec) if not kind.written_out]
    if not kinds:
        return inapplicable("what holds the layers runs their parts, which are tested as blocks")
    result = _tests(tested, "layer")
    paths = {row["block"] for row in _rows(tested, "layer") if row["status"] == "passed"}
    lacking = [f"{kind.name}: {kind.path} has no test" for kind in kinds if kind.path not in paths]
    return Found("open" if lacking else result.state, [*result.lines, *lacking])


def logits(tested: Tested) -> Found:
    """The error of the whole model's logits."""
    return _tests(tested, "model", "first_position")


def export(tested: Tested) -> Found:
    """The error of the exported graph on another shape."""
    return _tests(tested, "export")


def cached_decode(tested: Tested) -> Found:
    """The error of decode with each cache."""
    return _tests(tested, "cached_decode")


def several_ranks(tested: Tested) -> Found:
    """The error of each rank, and why the model is divided otherwise than among two."""
    result = _tests(tested, "several_ranks")
    notes = [row["message"] for row in _rows(tested, "several_ranks") if row["message"]]
    return Found(result.state, [*result.lines, *notes])


def on_the_cpu(tested: Tested) -> Found:
    """How many tests ran on a CPU, and on a GPU."""
    counts = {
        device: sum(
            row["status"] == "passed" and row.get("device") == device for row in _all(tested)
        )
        for device in ("cpu", "cuda")
    }
    lines = [f"{count} tests passed on {device}" for device, count in counts.items()]
    return found(counts["cpu"] > 0, *lines)


def _all(tested: Tested) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = tested.found["tests"].get("tests", [])
    return rows


def _rows(tested: Tested, *levels: str) -> list[dict[str, Any]]:
    return [row for row in _all(tested) if row["level"] in levels]


def _tests(tested: Tested, *levels: str) -> Found:
    """Return the tests of a level, each with its error and limit."""
    rows = _rows(tested, *levels)
    statuses = [row["status"] for row in rows]
    places = dict(_places(tested))
    lines = [_measured(row, places.get(row["block"], "")) for row in rows]
    return found("passed" in statuses and "failed" not in statuses, *(lines or ["no test ran"]))


def _measured(row: dict[str, Any], place: str) -> str:
    """Return a test's result: what, where, its error and limit."""
    what = f"{row['block']} ({place})" if place else row["block"] or row["name"]
    error, limit = row.get("error"), row.get("tolerance")
    if row["status"] != "passed" or error is None or limit is None:
        return f"{what}: {row['status']}{': ' + row['message'] if row['message'] else ''}"
    device = row.get("device", "cpu")
    return f"{what}: relative RMSE {error:.1e}, limit {limit:.1e}{rounded(row)}, {device}"


def _places(tested: Tested) -> Iterator[tuple[str, str]]:
    """Yield the module path of each block with its class and lines in the model file."""
    spec = tested.context.spec
    path = f"models/modeling_{spec.family}.py"
    lines = class_lines(tested.text(path))
    named = {block.path: block.class_name for block in spec.blocks}
    for kind in spec.layer_kinds:
        named |= {f"{kind.path}.{name}": of for name, of in kind.modules.items()}
    for module, name in named.items():
        if name in lines:
            first, last = lines[name]
            yield module, f"{path}:{first}-{last} {name}"
