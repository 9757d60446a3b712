"""`registry/coverage.json`: what a sweep over all model types found, for programs, in an order that
does not change.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from onboard.config import Mode, StrictModel
from onboard.workflow.phases import PHASES
from onboard.workflow.sweep.inputs.targets import VARIANTS, Variant
from onboard.workflow.sweep.target_record import STATUSES, Entry, Status

PATH = Path("registry", "coverage.json")
_ELLIPSIS = "…"


class Coverage(StrictModel):
    """The content of the file."""

    schema_version: Literal[2] = 2
    versions: dict[str, str]
    source_hash: str
    """Of the code and templates that were measured."""
    device: str
    mode: Mode = "graph"
    until: str
    limits: dict[str, float]
    """Of one target: seconds and, for each of its processes, gibibytes."""
    asked: int
    """Targets that the sweep was to go over; `entries` has fewer when it was stopped early."""
    variants: list[Variant]
    """The checkpoints of each type."""
    entries: list[Entry] = Field(default_factory=list)

    @property
    def is_partial(self) -> bool:
        """Whether some targets were not measured."""
        return len(self.entries) < self.asked

    @property
    def is_whole(self) -> bool:
        """Whether all of the command was measured on both checkpoints of each type."""
        return self.mode == "graph" and self.until == PHASES[-1] and self.variants == list(VARIANTS)

    def counts(self) -> dict[Status, int]:
        """Return the number of entries of each status."""
        return {
            status: sum(entry.status == status for entry in self.entries) for status in STATUSES
        }

    def types(self) -> dict[str, list[Entry]]:
        """Return the entries of each type."""
        found: dict[str, list[Entry]] = {}
        for entry in self.entries:
            found.setdefault(entry.type, []).append(entry)
        return found

    def causal(self) -> dict[str, list[Entry]]:
        """Return the entries of each type whose usual checkpoint is a causal language model."""
        return {
            name: entries
            for name, entries in self.types().items()
            if entries[0].status != "not-causal"
        }

    def succeeded(self) -> list[str]:
        """Return the types that passed on each of their checkpoints."""
        return [
            name
            for name, entries in self.causal().items()
            if [entry.variant for entry in entries] == self.variants
            and worst(entries).status == "pass"
        ]

    def reached(self, variant: Variant) -> dict[str, int]:
        """Return how many checkpoints were made, came through each phase, and are what the judge
        agrees with.
        """
        entries = [entry for entry in self.entries if entry.variant == variant]
        made = {"checkpoint": sum(entry.levels.get("checkpoint") == "passed" for entry in entries)}
        phases = {
            name: sum(entry.phases.get(name) == "done" for entry in entries) for name in PHASES
        }
        exits = {"exit code 0": sum(entry.exit_code == 0 for entry in entries)}
        agreed = sum(entry.verdict is not None and entry.verdict.agrees for entry in entries)
        return made | phases | exits | {"the judge agrees": agreed}

    def notes(self) -> dict[str, int]:
        """Return the review's notes on style of each type that has any, of its checkpoints the
        most.
        """
        counts = {
            name: max(entry.notes or 0 for entry in entries)
            for name, entries in self.types().items()
        }
        return {name: count for name, count in counts.items() if count}

    def summary(self) -> str:
        """Return the count that matters most, as one line."""
        passed, of = len(self.succeeded()), len(self.causal())
        where = "on both checkpoints" if len(self.variants) > 1 else "on its checkpoint"
        if self.mode != "graph":
            return f"transformers' logits and greedy tokens in mode {self.mode}: {passed} of {of} types {where}"
        return f"the command succeeded and the judge agrees {where}: {passed} of {of} causal types"

    def text(self) -> str:
        """Return the file's text."""
        return self.model_dump_json(indent=2) + "\n"


def ordered(entries: Sequence[Entry]) -> list[Entry]:
    """Return entries by type and variant."""
    return sorted(entries, key=lambda entry: (entry.type, entry.variant))


def worst(entries: Sequence[Entry]) -> Entry:
    """Return the entry that is the least of a pass, as `STATUSES` orders them; what is wrong above
    all.
    """
    return max(entries, key=lambda entry: (entry.status == "wrong", STATUSES.index(entry.status)))


def group_by_reason(entries: Sequence[Entry]) -> list[tuple[str, list[Entry]]]:
    """Return (common reason, entries), the largest group first; what differs between types is left
    out of a reason.
    """
    groups: dict[str, list[Entry]] = {}
    for entry in ordered(entries):
        groups.setdefault(common_reason(entry), []).append(entry)
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))


def common_reason(entry: Entry) -> str:
    """Return an entry's reason without what differs between types: numbers, places, names of
    classes and modules.

    What comes after the first sentence is advice, and left out too.
    """
    text = re.split(r"\. (?=[A-Z])", entry.reason, maxsplit=1)[0]
    text = re.sub(r" at modeling_\w+\.py:\d+", "", text)
    text = re.sub(r"\b(?:[A-Za-z_]\w*\.)+\d+(?:\.\w+)*\b", _ELLIPSIS, text)  # the path of a module
    text = re.sub(
        r"[\w-]+", lambda word: _ELLIPSIS if _is_own_name(word[0], entry) else word[0], text
    )
    return re.sub(r"(?<![\w.])-?\d[\d.]*(?:e[+-]?\d+)?\b", "N", text)


def _is_own_name(word: str, entry: Entry) -> bool:
    """Whether a word is the type, or a class of it: one that begins as its architecture or its type
    does.
    """
    start = re.sub(r"\W|_", "", entry.type)[:3].lower()
    is_class = word[:1].isupper() and word[1:2] != "" and word.lower().startswith(start)
    return word in (entry.type, entry.architecture) or (is_class and not word.endswith("Error"))
