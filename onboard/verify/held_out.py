"""Is a run's text transformers' own? Its loss on held-out text against that of transformers, story
by story.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

Verdict = Literal["equal", "different", "not judged"]

HELD_OUT = """\
The old man walked down to the river every morning before the sun came up. He carried a small basket and a long stick, \
and his brown dog ran ahead of him along the path. When they came to the water, he sat on a flat stone and waited. He \
did not mind the cold. "The fish will come," he said to the dog, "if we are quiet." Most days they went home with \
nothing, but he was never sad about it. One day a little girl from the village came and sat down beside him. She asked \
him why he came here if he never caught any fish. He thought about it for a long time. Then he smiled and said that \
the river had more to give than fish, and that she would know what he meant when she was older."""
"""Plain English, for checkpoints that bring no `heldout.txt` of their own."""
HELD_OUT_FILE = "heldout.txt"
"""Held-out text beside a checkpoint, of the kind that the model was trained on."""
SEPARATOR = "---"
"""A line between its stories."""


@dataclass(frozen=True)
class Text:
    """The judgement on a run's text."""

    verdict: Verdict
    """"equal": the model finds held-out text as likely as transformers' model does; that is not to
    say that it is.
    """
    reason: str
    perplexity: float | None = None
    """exp of the mean loss a token on held-out text; None without a tokenizer."""
    reference: float | None = None
    """That of transformers in float32."""


def stories(checkpoint: Path) -> list[str]:
    """Return the texts of the checkpoint's own held-out file, or one of plain English."""
    path = checkpoint / HELD_OUT_FILE
    text = path.read_text(encoding="utf-8") if path.is_file() else HELD_OUT
    found = "\n".join(
        "\0" if line.strip() == SEPARATOR else line for line in text.splitlines()
    ).split("\0")
    return [story.strip() for story in found if story.strip()]


def mean_nll(logits: Sequence[torch.Tensor], token_ids: Sequence[Sequence[int]]) -> float:
    """Return the mean loss in nats of what follows each sequence's first token; logits are [tokens,
    vocabulary].
    """
    losses = [_losses(rows, ids) for rows, ids in zip(logits, token_ids, strict=True)]
    return float(torch.cat(losses).mean())


def _losses(logits: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    targets = torch.tensor(token_ids[1:], device=logits.device)
    return torch.nn.functional.cross_entropy(logits[:-1].double(), targets, reduction="none")


def judge(nll: float, reference: float, *, allowed: float, beside: str = "transformers") -> Text:
    """Judge the mean loss on held-out text: it may be `allowed` nats from that of the model it is
    held `beside`, in float32.
    """
    perplexity, expected = _perplexity(nll), _perplexity(reference)
    whose = f"{beside}'{'' if beside.endswith('s') else 's'}"
    reason = f"held-out perplexity {_shown(perplexity)}, {whose} {_shown(expected)}"
    verdict: Verdict = "equal" if abs(nll - reference) <= allowed else "different"
    return Text(verdict, reason, perplexity, expected)


def _perplexity(nll: float) -> float | None:
    return math.exp(min(nll, 700.0)) if math.isfinite(nll) else None


def _shown(perplexity: float | None) -> str:
    return "not a number" if perplexity is None else f"{perplexity:.4g}"
