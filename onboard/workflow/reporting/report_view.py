"""What the report shows, computed from the artifacts; the templates only lay it out."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from onboard import __version__
from onboard.agents.role_runs import load_runs
from onboard.analysis.blocks.spec_mixtures import Experts
from onboard.analysis.spec import LayerKind, ModelSpec
from onboard.workflow.checkpoint.checkpoint_size import layer_kinds, max_positions, native_values
from onboard.workflow.phase import RunContext
from onboard.workflow.reporting.human_notes import human_notes, reduced_facts
from onboard.workflow.reporting.layer_picture import layer_parts
from onboard.workflow.reporting.rounded_tests import rounded
from onboard.workflow.run_model.runner_record import RETRY

ARTIFACTS = ("gather", "survey", "tests", "review", "registration", "run")
"""What the report is made from, besides the spec."""
_LEVELS = (1e-9, 1.0)
"""Ends of the logarithmic scale on which errors are drawn."""


def report_view(context: RunContext) -> dict[str, Any]:
    """Return everything that the report's templates use."""
    spec = context.spec
    kinds = layer_kinds(spec)
    found = found_artifacts(context)
    runs = list(found["run"].get("runs", {}).items())
    return {
        "version": __version__,
        "spec": spec,
        "name": found["registration"].get("name", context.model),
        "about": about(found["run"]),
        "facts": key_facts(spec, found["gather"]),
        "chips": chips(found, dict(runs)),
        "layers": layer_strip(kinds),
        "kinds": [kind_view(spec, kind, index) for index, kind in enumerate(kinds)],
        "files": files(context, found),
        "tests": test_groups(found["tests"].get("tests", [])),
        "test_command": found["tests"].get("command", ""),
        "review": found["review"],
        "review_items": review_groups(found["review"]),
        "review_text": review_text(found["review"]),
        "agents": [run for run in load_runs(context.work_dir) if run.back_end != "builtin"],
        "runs": [run_view(name, run) for name, run in runs],
        "notes": human_notes(spec, found),
        "reduced_facts": reduced_facts(dict(runs)),
        "full": dict(runs).get("full", {}),
        "command": found["run"].get("command", ""),
        "registration": found["registration"],
        "survey": found["survey"],
    }


def found_artifacts(context: RunContext) -> dict[str, dict[str, Any]]:
    """Return the JSON artifacts by name; empty ones when the road did not come that far."""
    return {name: _optional(context, f"{name}.json") for name in ARTIFACTS}


def about(run: dict[str, Any]) -> list[tuple[str, str]]:
    """Return when, with what, where and how the run was made, as (name, value); what nobody
    recorded is left out.
    """
    made, settings = (
        run.get("provenance", {}),
        run.get("runs", {}).get("full", {}).get("settings", {}),
    )
    versions = [f"{name} {version}" for name, version in made.get("versions", {}).items()]
    gpu = [settings["device_name"]] if settings.get("device") == "cuda" else []
    host = [made["host"]] if "host" in made else []
    commits = {"onboard": made.get("source_commit"), "this root": made.get("root_commit")}
    found = [
        ("Date", run.get("date", "")[:16].replace("T", " ") + " UTC" if "date" in run else ""),
        ("Machine", "; ".join([*gpu, *host])),
        ("Versions", ", ".join(versions)),
        (
            "Commit",
            "; ".join(
                f"{short_commit(commit)} ({name})" for name, commit in commits.items() if commit
            ),
        ),
        ("Command", made.get("onboard", "")),
    ]
    return [(name, value) for name, value in found if value]


def short_commit(commit: str) -> str:
    """Return a commit for people; one that is "-dirty" has changes."""
    digest, _, dirty = commit.partition("-")
    return f"{digest[:12]}{' with changes' if dirty else ''}"


def key_facts(spec: ModelSpec, gather: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the figures of the overview, as (value, name)."""
    config, positions = native_values(spec.config), max_positions(spec.config)
    found = [
        (short_count(spec.num_parameters), "parameters"),
        *active_facts(spec),
        (str(sum(len(kind.layers) for kind in layer_kinds(spec))), "layers"),
        (str(config.get("hidden_size") or ""), "hidden size"),
        (str(config.get("vocab_size") or ""), "vocabulary"),
        (f"{positions:,}" if positions else "", "positions"),
        (size(gather["bytes"]) if gather.get("bytes") else "", "of weights"),
    ]
    return [(value, name) for value, name in found if value]


def active_facts(spec: ModelSpec) -> list[tuple[str, str]]:
    """Return the figures of a mixture: parameters and experts that one token meets."""
    values = {
        name: spec.traits[name].value
        for name in ("experts", "experts_per_token")
        if name in spec.traits
    }
    active = spec.active_parameters
    at_most = any(block.parameters.identity for block in spec.blocks if isinstance(block, Experts))
    return [
        (short_count(active) if active else "", f"active a token{', at most' if at_most else ''}"),
        (
            " of ".join(str(values[name]) for name in reversed(values)) if len(values) > 1 else "",
            "experts a token",
        ),
    ]


def chips(found: dict[str, Any], runs: dict[str, Any]) -> list[dict[str, str]]:
    """Return the verdicts at the top of the report: title, text and state (good, bad or open)."""
    tests, full = found["tests"].get("tests", []), runs.get("full", {})
    passed = sum(test["status"] == "passed" for test in tests)
    failed = sum(test["status"] == "failed" for test in tests)
    skipped = f", {len(tests) - passed - failed} skipped" if passed + failed < len(tests) else ""
    verdict = (full.get("text") or {}).get("verdict", "not run")
    return [
        _chip(
            "Tests",
            f"{passed} passed{f', {failed} failed' if failed else ''}{skipped}",
            bool(tests) and not failed,
        ),
        _chip("Review", review_text(found["review"]), found["review"].get("verdict") == "PASS"),
        _chip(
            "Run", found["run"].get("status", "not run"), found["run"].get("status") == "success"
        ),
        {
            "title": "Text",
            "text": verdict,
            "state": {"equal": "good", "different": "bad"}.get(verdict, "open"),
        },
    ]


def review_text(review: dict[str, Any]) -> str:
    """Return the reviewer's verdict, after how many reviews, and how many places it noted."""
    count = review.get("iterations")
    after = f" after {count} {'review' if count == 1 else 'reviews'}" if count else ""
    noted = f"; style notes: {review['notes']}" if review.get("notes") else ""
    return f"{review.get('verdict', 'not run')}{after}{noted}"


def _chip(title: str, text: str, good: bool) -> dict[str, str]:
    return {
        "title": title,
        "text": text,
        "state": "open" if text == "not run" else "good" if good else "bad",
    }


def layer_strip(kinds: list[LayerKind]) -> list[dict[str, Any]]:
    """Return the decoder layers from first to last, each with the number of its kind."""
    kind_of = {layer: index for index, kind in enumerate(kinds) for layer in kind.layers}
    return [{"index": layer, "kind": kind_of[layer]} for layer in sorted(kind_of)]


def kind_view(spec: ModelSpec, kind: LayerKind, index: int) -> dict[str, Any]:
    """Return a kind of layer: which layers are of it, and the parts of the first one."""
    return {
        "name": kind.name.replace("_", " "),
        "index": index,
        "count": len(kind.layers),
        "range": ranges(kind.layers),
        "parts": layer_parts(spec, kind, native_values(spec.config)),
    }


def ranges(numbers: list[int]) -> str:
    """Return numbers as ranges: "0-3, 5"."""
    runs = (
        list(group)
        for _, group in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    )
    bounds = ((run[0][1], run[-1][1]) for run in runs)
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in bounds)


def files(context: RunContext, found: dict[str, Any]) -> list[dict[str, str]]:
    """Return the files that this model has under the root, with links relative to the report."""
    from onboard.workflow.phases.cookbook import notebook_path

    family, registration = context.spec.family, found["registration"]
    listed = [
        (f"models/modeling_{family}.py", "generated model"),
        (f"tests/equivalence/test_{family}_modeling.py", "generated tests"),
        ("registry/models.yaml", f"registry, entry {registration.get('entry_status', 'missing')}"),
        (
            registration.get("config", ""),
            f"standalone config, {registration.get('config_status', '')}",
        ),
        ("registry/supported_models.md", "support matrix"),
        (context.relative(notebook_path(context)) if registration else "", "cookbook"),
        *((context.relative(context.artifact(name)), what) for name, what in _WORK_FILES),
    ]
    return [
        {"path": path, "href": _href(context.root / path, context.work_dir), "what": what}
        for path, what in listed
        if path and context.root.joinpath(path).exists()
    ]


_WORK_FILES = (
    ("spec.yaml", "spec, which may be edited"),
    ("tests.json", "test results"),
    ("review.json", "review"),
    ("agents.json", "who was asked to mend, port or judge, and what was kept"),
    ("run.json", "prompts, outputs, pipeline history"),
    ("worklog.md", "worklog"),
    ("worklog.jsonl", "worklog for programs"),
)


_BESIDE = {
    "export": "the same generated model before its export: whether the exported graph takes other shapes",
    "several_ranks": "the same generated model on one rank",
    "first_position": "transformers' own model, whose positions begin there",
}
"""Level -> what its tests are compared with, where that is not transformers."""


def test_groups(tests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tests by level, in the order in which they ran, each with its bar on the error
    scale.

    Those that passed are apart from the others, and skipped ones are only counted, by reason.
    """
    levels: dict[str, list[dict[str, Any]]] = {}
    for test in tests:
        row = test | {
            "bar": error_position(test["error"]),
            "tick": error_position(test["tolerance"]),
        }
        levels.setdefault(test["level"], []).append(row)
    return [
        {
            "level": level.replace("_", " "),
            "beside": _BESIDE.get(level, "Hugging Face's model with the same random weights"),
            "passed": (passed := [row for row in rows if row["status"] == "passed"]),
            "summary": passed_summary(passed),
            "rows": [row for row in rows if row["status"] not in ("passed", "skipped")],
            "skipped": Counter(row["message"] for row in rows if row["status"] == "skipped"),
        }
        for level, rows in levels.items()
    ]


def passed_summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return how many tests passed, and the one that came nearest to its tolerance."""
    measured = [row for row in rows if row["error"] is not None and row["tolerance"]]
    worst = max(measured, key=lambda row: row["error"] / row["tolerance"], default=None)
    if worst is None:
        return f"{len(rows)} passed"
    found = f"an error of {worst['error']:.1e}" if worst["error"] else "no error at all"
    allowed = f"{worst['tolerance']:.0e} allowed{rounded(worst)}"
    return f"{len(rows)} passed, the nearest to its tolerance with {found} ({allowed})"


def review_groups(review: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the reviewer's items: those that hold, and the others."""
    items = review.get("items", [])
    return {
        "held": [item for item in items if item["verdict"] == "PASS"],
        "others": [item for item in items if item["verdict"] != "PASS"],
    }


def error_position(error: float | None) -> float | None:
    """Return where an error lies on the logarithmic scale, in percent; None when nothing was
    measured.
    """
    if error is None:
        return None
    low, high = map(math.log10, _LEVELS)
    position = 100 * (math.log10(max(error, 1e-300)) - low) / (high - low)
    return round(min(max(position, 0.0), 100.0), 1)


def run_view(name: str, run: dict[str, Any]) -> dict[str, Any]:
    """Return a run with readable sizes and its transforms' bars (share of the slowest), idle ones
    apart.
    """
    transforms = [entry for entry in run.get("transforms", []) if entry["enabled"]]
    slowest = max((entry["seconds"] for entry in transforms), default=0) or 1
    bars = [entry | {"bar": round(100 * entry["seconds"] / slowest, 1)} for entry in transforms]
    idle = [entry for entry in bars if not entry["num_matches"] and not entry["error"]]
    skipped = sum(entry["skipped"] for entry in idle)
    return run | {
        "name": name,
        "transforms": [entry for entry in bars if entry not in idle],
        "idle": idle,
        "idle_summary": f"{len(idle)} more: {len(idle) - skipped} matched nothing, {skipped} were skipped",
        "memory": size(run.get("peak_memory_bytes") or 0),
        "tries": tries(run),
    }


def tries(run: dict[str, Any]) -> int:
    """Return how often a run was tried: each try that is repeated leaves a fact."""
    facts: list[str] = run.get("facts", [])
    return 1 + sum(fact.startswith(RETRY) for fact in facts)


def size(num_bytes: float) -> str:
    """Return a number of bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}" if unit != "B" else f"{num_bytes:.0f} B"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} GiB"


def short_count(number: int) -> str:
    """Return a count for people: 8.03 B, 124 M, 512."""
    for factor, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= factor:
            return f"{number / factor:.3g}{unit}"
    return str(number)


def _optional(context: RunContext, name: str) -> dict[str, Any]:
    """Return an artifact, or nothing when the road did not come that far."""
    try:
        content: dict[str, Any] = context.read_json(name)
    except FileNotFoundError:
        return {}
    return content


def _href(path: Path, base: Path) -> str:
    return Path(os.path.relpath(path, base)).as_posix()
