"""What a command that was asked for a document gives back: `onboard.cli.main` prints it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Result:
    """The command's own fields of its document, and the error that it ended in."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    error: BaseException | None = None


@dataclass(frozen=True)
class Document:
    """All of a command's document, which is older than the fields that others have, and its exit code."""

    content: Any
    code: int = 0
