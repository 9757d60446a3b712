"""The commit that a pull request asks to merge, and whether it has the files that were tested and
run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from onboard.git import Checkout
from onboard.workflow.phase import RunContext


@dataclass(frozen=True)
class Pushed:
    """A commit with the model's files."""

    commit: str
    """Its whole id."""
    target: str = ""
    """The branch that it is to be merged into, as the checkout knows it (`origin/main`)."""


@dataclass
class Tested:
    """What was tested and run, beside the commit."""

    context: RunContext
    found: dict[str, dict[str, Any]]
    """The artifacts by name."""
    pushed: Pushed | None

    @cached_property
    def _checkout(self) -> Checkout | None:
        return Checkout.find(self.context.root) if self.pushed is not None else None

    def text(self, path: str) -> str:
        """Return a file's text as the commit has it, without one as the root has it; "" where there
        is none.
        """
        content = self._content(path)
        return "" if content is None else content.decode("utf-8", errors="replace")

    def _content(self, path: str) -> bytes | None:
        if self.pushed is not None:
            return self._checkout.content(path, self.pushed.commit) if self._checkout else None
        files, place = self.context.files, self.context.root / path
        return files.read(place).encode() if files.exists(place) else None

    def based_on(self) -> tuple[str, str]:
        """Return the last commit in common with the target, and the target's tip."""
        if self.pushed is None or self._checkout is None or not self.pushed.target:
            return "", ""
        return self._checkout.base(self.pushed.commit, self.pushed.target)

    def differences(self) -> list[str]:
        """Return, in sentences, what was tested or run with another text than the commit has, or
        without saying with which.
        """
        return [*self._compared("tests", "The tests"), *self._compared("run", "The run")]

    def _compared(self, name: str, what: str) -> Iterator[str]:
        files = self.found[name].get("files")
        if not files:
            yield f"{what} did not record the files that they were made with: {name}.json."
            return
        for path, digest in files.items():
            content = self._content(path)
            now = "" if content is None else hashlib.sha256(content).hexdigest()
            if now == digest:
                continue
            there = f"sha256 {now[:12]}" if now else "no such file"
            yield f"{what} had {path} with sha256 {(digest or 'none')[:12]}, and the commit has {there}."
