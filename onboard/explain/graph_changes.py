"""What each transform did to a model's graph, how long what it put in takes, and why one did nothing.

All of it is on record: the history and the facts of the run, and the profile of `onboard bench`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from onboard.explain.launched_kernels import kernels_of

NAMESPACE = "onboard::"


def changes(run: Mapping[str, Any], profile: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the transforms of a run that changed something, in order.

    Each has `stage`, `key`, `matches`, `nodes` (before and after, or None where the record has
    none), `ops` (operators, and how many more or fewer), `memory_bytes` and `microseconds`: of a
    decode step, of the kernels that only operators launch that this transform put in.
    """
    took = microseconds(run, profile)
    return [
        {
            "stage": entry["stage"],
            "key": entry["key"],
            "matches": entry["num_matches"],
            "nodes": entry.get("nodes"),
            "ops": entry.get("ops", {}),
            "memory_bytes": entry["memory_delta"],
            "microseconds": took.get(entry["key"]),
        }
        for entry in run.get("transforms", [])
        if entry["enabled"] and not entry["skipped"] and (entry["num_matches"] or entry.get("ops"))
    ]


def not_applied(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the recorded reasons why transforms did nothing, or not all, each with the `keys` that
    have it.
    """
    found: dict[str, list[str]] = {}
    for entry in run.get("transforms", []):
        facts = _facts_of(entry["key"], run.get("facts", []))
        idle = entry["skipped"] or not entry["enabled"] or not entry["num_matches"]
        if facts or (idle and entry["stage"] not in _NO_CHANGE):
            found.setdefault("; ".join(facts) or _why(entry), []).append(entry["key"])
    return [{"why": why, "keys": keys} for why, keys in found.items()]


_NO_CHANGE = ("cache", "visualize")
"""What the history has besides transforms that change a graph."""


def _why(entry: Mapping[str, Any]) -> str:
    if not entry["enabled"]:
        return "it is off, as the pipeline or the settings say"
    if entry["error"]:
        return f"it failed: {entry['error']}"
    if entry["skipped"]:
        return entry.get("summary") or "it was skipped, and no reason is on record"
    if entry.get("ops") or entry.get("summary"):
        return str(entry["summary"] or "it changed the graph without a match")
    return "it looked, and the graph has nothing that it fits"


def _facts_of(key: str, facts: Iterable[str]) -> list[str]:
    return [fact for fact in facts if re.match(rf"{re.escape(key)}\b", fact)]


def owners(run: Mapping[str, Any]) -> dict[str, str]:
    """Return each operator of the final graph, with the transform that put it in last."""
    counts, last = Counter[str](), dict[str, str]()
    for entry in run.get("transforms", []):
        for op, more in entry.get("ops", {}).items():
            counts[op] += more
            if more > 0:
                last[op] = entry["key"]
    return {op: key for op, key in last.items() if counts[op] > 0}


def kernel_rows(run: Mapping[str, Any], profile: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the kernels of a profiled step, the longest first: `name`, `calls`, `us`, the `ops` of
    the graph that may launch each, and the `transforms` that put those in.
    """
    owned = owners(run)
    launched = {op: kernels_of(op) for op in owned}
    rows = []
    for row in (profile or {}).get("totals", []):
        name = row["name"].removeprefix(NAMESPACE)
        ops = sorted(op for op in owned if name == op or name in launched[op])
        keys = list(dict.fromkeys(owned[op] for op in ops))
        rows.append({**row, "ops": ops, "transforms": keys})
    return rows


def microseconds(run: Mapping[str, Any], profile: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the microseconds of a decode step by transform, of kernels that no other's operators
    launch.
    """
    sums = Counter[str]()
    for row in kernel_rows(run, profile):
        if len(row["transforms"]) == 1:
            sums[row["transforms"][0]] += row["us"]
    return dict(sums)


def chosen_profile(bench: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the profile of the smallest shape that was recorded on a GPU, with its `batch`,
    `context` and `device`; None where there is none.
    """
    device = bench.get("hardware", {}).get("device", "")
    results: Sequence[Mapping[str, Any]] = bench.get("results", [])
    recorded = [each for each in results if "profile" in each]
    if not recorded or bench.get("device_type") != "cuda":
        return None
    first = min(recorded, key=lambda each: (each["max_concurrency"], each["input_len"]))
    shape = {"batch": first["max_concurrency"], "context": first["input_len"]}
    return {"device": device, **shape, "date": bench["date"], **first["profile"]}
