"""A checkpoint's own prompts."""

from __future__ import annotations

from pathlib import Path

from onboard.untrusted.bounds import TEXT_BYTES, read_text

PROMPTS_FILE = "prompts.txt"
"""Prompts beside a checkpoint, a line each, of the kind that the model was trained on; used in
place of those for any model. Where there is a chat template the last of several is a chat turn.
"""


def own_prompts(checkpoint: Path) -> list[str]:
    """Return the prompts that a checkpoint brings, none where it brings none."""
    path = checkpoint / PROMPTS_FILE
    return read_text(path, TEXT_BYTES).splitlines() if path.is_file() else []
