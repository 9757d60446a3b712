"""Where a model's files come from: a local folder, the Hugging Face cache, or a Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol


class ModelSource(Protocol):
    """A model's files, fetched no earlier than they are needed."""

    model: str
    revision: str | None
    """The resolved commit, or None for a local folder."""

    def config(self) -> dict[str, Any]:
        """Return the parsed config.json."""

    def files(self) -> Path:
        """Return a folder with config, code and tokenizer; weights need not be there."""

    def weights(self) -> Path:
        """Return a folder that also has all safetensors files."""
