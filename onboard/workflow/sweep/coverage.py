"""`registry/coverage.json`: what a sweep over all model types found, for programs, in an order that does not change."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from onboard.config import Mode, StrictModel
from onboard.workflow.files import write_atomically
from onboard.workflow.sweep.record import PREFILL, STATUSES, Entry, Status, all_levels

PATH = Path("registry", "coverage.json")
_ELLIPSIS = "…"


class Coverage(StrictModel):
    """The content of the file."""

    schema_version: Literal[1] = 1
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
    entries: list[Entry] = Field(default_factory=list)

    @property
    def is_partial(self) -> bool:
        """Whether some targets were not measured."""
        return len(self.entries) < self.asked

    def counts(self) -> dict[Status, int]:
        """Return the number of entries of each status."""
        return {status: sum(entry.status == status for entry in self.entries) for status in STATUSES}

    def reached(self) -> dict[str, int]:
        """Return how many entries passed everything up to each level."""
        levels = all_levels(self.mode)
        depth = [levels.index(entry.level) if entry.level else -1 for entry in self.entries]
        return {level: sum(at >= index for at in depth) for index, level in enumerate(levels)}

    def summary(self) -> str:
        """Return the two counts that matter most, as one line."""
        passed = self.counts()["pass"]
        if self.mode != "graph":
            return f"transformers' logits and greedy tokens in mode {self.mode}: {passed} of {self.asked}"
        prefill, decode = self.reached()[PREFILL], passed
        return f"every level of prefill equivalence: {prefill} of {self.asked}; cached decode too: {decode}"

    def text(self) -> str:
        """Return the file's text."""
        return self.model_dump_json(indent=2) + "\n"


def ordered(entries: Sequence[Entry]) -> list[Entry]:
    """Return entries by type and variant."""
    return sorted(entries, key=lambda entry: (entry.type, entry.variant))


def group_by_reason(entries: Sequence[Entry]) -> list[tuple[str, list[Entry]]]:
    """Return (common reason, entries), the largest group first; what differs between types is left out of a reason."""
    groups: dict[str, list[Entry]] = {}
    for entry in ordered(entries):
        groups.setdefault(common_reason(entry), []).append(entry)
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))


def common_reason(entry: Entry) -> str:
    """Return an entry's reason without what differs between types: numbers, places, names of classes and modules.

    What comes after the first sentence is advice, and left out too.
    """
    text = re.split(r"\. (?=[A-Z])", entry.reason, maxsplit=1)[0]
    text = re.sub(r" at modeling_\w+\.py:\d+", "", text)
    text = re.sub(r"\b(?:[A-Za-z_]\w*\.)+\d+(?:\.\w+)*\b", _ELLIPSIS, text)  # the path of a module
    text = re.sub(r"[\w-]+", lambda word: _ELLIPSIS if _is_own_name(word[0], entry) else word[0], text)
    return re.sub(r"(?<![\w.])-?\d[\d.]*(?:e[+-]?\d+)?\b", "N", text)


def _is_own_name(word: str, entry: Entry) -> bool:
    """Whether a word is the type, or a class of it: one that begins as its architecture or its type does."""
    start = re.sub(r"\W|_", "", entry.type)[:3].lower()
    is_class = word[:1].isupper() and word[1:2] != "" and word.lower().startswith(start)
    return word in (entry.type, entry.architecture) or (is_class and not word.endswith("Error"))


def write_coverage(coverage: Coverage, root: Path) -> list[Path]:
    """Write the file, the document and the picture; return their paths relative to the root."""
    from onboard.workflow.sweep.document import DOCUMENT, PICTURE, document, picture

    texts = {PATH: coverage.text(), DOCUMENT: document(coverage, root), PICTURE: picture(coverage, root)}
    for path, text in texts.items():
        write_atomically(root / path, text)
    return list(texts)
