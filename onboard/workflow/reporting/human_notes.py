"""What a human should look at: one list, the same in the report and in the text of the pull
request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from onboard.analysis.spec import ModelSpec
from onboard.workflow.checkpoint.checkpoint_size import max_positions

Topic = Literal["model", "not shown", "review", "fact"]


class Note(NamedTuple):
    """One thing to look at."""

    topic: Topic
    """About the model, of what no test or run has shown, of a rule of the review, or a fact of the
    full run.
    """
    text: str


def human_notes(spec: ModelSpec, found: dict[str, Any]) -> list[Note]:
    """Return what a human should look at, from the artifacts by name; each thing once."""
    runs = found["run"].get("runs", {})
    notes = [
        *(
            Note("model", note)
            for note in [
                *spec.tricky,
                *_own_code(spec, found.get("gather", {})),
                *_relatives(found.get("survey", {})),
            ]
        ),
        *(Note("not shown", note) for note in limitations(spec, found)),
        *(Note("review", note) for note in _reviewed(found["review"])),
        *(Note("fact", fact) for fact in runs.get("full", {}).get("facts", [])),
    ]
    return list({note.text: note for note in reversed(notes)}.values())[::-1]


def _own_code(spec: ModelSpec, gather: dict[str, Any]) -> list[str]:
    if spec.repository is None:
        return []
    walls = gather.get("walls", {})
    notes = [
        f"Code that the model brings was trusted and run: {', '.join(sorted(spec.repository.files))}.",
        f"Walls around it: {', '.join(walls.get('hold', [])) or 'none'}.",
    ]
    lacking = ", ".join(walls.get("missing", []))
    return notes + (
        [f"Walls that the system lacked: {lacking} (--unsandboxed)."] if lacking else []
    )


def _relatives(survey: dict[str, Any]) -> Iterator[str]:
    """Yield in which words and switches the configs of the family's other models differ, alike ones
    together.
    """
    groups: dict[str, list[str]] = {}
    for name, differences in survey.get("differences", {}).items():
        said = ", ".join(
            f"{key} {_value(theirs)} (here {_value(own)})"
            for key, (own, theirs) in differences.items()
        )
        groups.setdefault(said, []).append(name)
    for said, names in groups.items():
        if said:
            yield f"In the family's file, too, but with another config: {', '.join(names)}: {said}."


def _value(value: bool | str | None) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else value


def _reviewed(review: dict[str, Any]) -> Iterator[str]:
    """Yield the rules of the review that do not hold, with the first place of each."""
    for item in review.get("items", []):
        if item["verdict"] != "PASS":
            places = item["evidence"]
            more = f" and {len(places) - 1} more" if len(places) > 1 else ""
            yield f"{item['id']} does not hold: {item['title']}{f' ({places[0]}{more})' if places else ''}"


def limitations(spec: ModelSpec, found: dict[str, Any]) -> list[str]:
    """Return what is not covered, not shown or not judged."""
    full, tests = found["run"].get("runs", {}).get("full", {}), found["tests"].get("tests", [])
    settings, text = full.get("settings", {}), full.get("text") or {}
    skipped = sum(test["status"] == "skipped" for test in tests)
    notes = (
        [f"{skipped} tests were skipped: this machine lacks the hardware that they need."]
        if skipped
        else []
    )
    if not full:
        notes.append("There was no full run.")
    if settings.get("device") == "cpu":
        notes.append(
            "Ran on the CPU only: GPU kernels and CUDA graphs are untested for this model."
        )
    if settings.get("device") == "cuda" and not full["cuda_graphs"]["used"]:
        notes.append("CUDA graphs were not used.")
    if text.get("verdict") == "not judged":
        notes.append(f"The text was not judged: {text['reason']}.")
    notes += [
        f"{note[0].upper()}{note[1:]}." for note in (full.get("comparison") or {}).get("notes", [])
    ]
    positions, longest = max_positions(spec.config), settings.get("max_seq_len")
    if positions and longest and longest < positions:
        notes.append(
            f"The run had room for {longest:,} of the model's {positions:,} positions (max_seq_len)."
        )
    return notes


def reduced_facts(runs: dict[str, dict[str, Any]]) -> list[str]:
    """Return what runs recorded that the full one did not, each with the run's description."""
    full = runs.get("full", {}).get("facts", [])
    others = (
        (run.get("description", ""), fact) for run in runs.values() for fact in run.get("facts", [])
    )
    return list(
        dict.fromkeys(f"{description}: {fact}" for description, fact in others if fact not in full)
    )
