"""KL(A || B) of two ways of running a model on a text, with agreement and perplexity.

The first model's logits are kept on disk (`stored_logits.py`) and its memory is given back before
the second is loaded: a device never has both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from onboard.errors import NotFiniteError, OnboardError, UsageError
from onboard.verify.divergence.row_figures import RowFigures, compare_rows
from onboard.verify.divergence.side import Logits, Side
from onboard.verify.divergence.stored_logits import StoredLogits
from onboard.verify.divergence.text_windows import (
    Source,
    Window,
    random_source,
    text_source,
    windows,
)
from onboard.verify.hf_logits import release

TOKENS, WINDOW = 2048, 512
"""Positions that are compared, and those of one window, where nothing else is asked for."""


@dataclass(frozen=True)
class Figures:
    """What is said of all positions; None: infinite."""

    mean: float | None
    """KL(A || B) in nats a token."""
    p99: float | None
    """Its 99th percentile over positions, between neighbours by their distance."""
    largest: float | None
    top1: float
    """The share of positions where both find the same token most likely."""
    top5: float
    """The mean share of B's five most likely tokens that are among A's."""
    perplexity_a: float | None
    perplexity_b: float | None


@dataclass(frozen=True)
class AboutSide:
    """One side of a comparison."""

    model: str
    """As it was given."""
    device: str
    dtype: str
    settings: dict[str, Any]
    facts: list[str]


@dataclass(frozen=True)
class Divergence:
    """Two ways of running a model beside one another."""

    a: AboutSide
    b: AboutSide
    text: str
    seed: int | None
    """Of random tokens."""
    tokens: int
    """Positions that were compared."""
    window: int
    """Positions of a window."""
    figures: Figures
    facts: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON; figures are among them."""
        values = asdict(self)
        figures: dict[str, Any] = values.pop("figures")
        return values | figures


def measure(
    a: Side,
    b: Side,
    *,
    text: Path | None = None,
    tokens: int = TOKENS,
    window: int = WINDOW,
    seed: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Divergence:
    """Run A, then B, on the same text and compare their next-token distributions.

    Raises:
        UsageError: the two have different vocabularies, or there is no such text.
        OnboardError: a model cannot be loaded or computes what is no number.
    """
    _check_vocabularies(a, b)
    source = _source(a, text, tokens, seed)
    longest = min(side.context.runtime.max_seq_len for side in (a, b))
    size = min(window, max(1, longest - max(0, len(source.prefix) - 1)))
    cut = windows(source, tokens, size)
    count = sum(len(each.targets) for each in cut)
    _check(source, cut, a.vocabulary)
    facts = [f"tokens of the text: {count:,}, not {tokens:,}"] if count < tokens else []
    facts += [f"windows have {size:,} tokens: the models read no more"] if size < window else []
    about_a, about_b = _about(a), _about(b)
    with TemporaryDirectory(prefix="onboard-") as folder:
        stored = StoredLogits(Path(folder), count, a.vocabulary)
        say(f"A: {a.name}")
        _keep(a, cut, stored, about_a.facts)
        release()
        say(f"B: {b.name}")
        rows = _compared(b, cut, stored, about_b.facts)
        release()
    figures = summary(rows)
    return Divergence(about_a, about_b, source.what, source.seed, count, size, figures, facts)


def summary(rows: RowFigures) -> Figures:
    """Return the figures of all positions; raise `NotFiniteError` where one is not a number."""
    if bool(torch.isnan(rows.divergence).any()):
        raise NotFiniteError("the logits of A or B are not numbers")
    percentile = torch.quantile(rows.divergence, 0.99)
    return Figures(
        _number(float(rows.divergence.mean())),
        _number(float(percentile)),
        _number(float(rows.divergence.max())),
        float(rows.same_best.mean()),
        float(rows.same_five.mean()),
        _perplexity(rows.loss_a),
        _perplexity(rows.loss_b),
    )


def _check_vocabularies(a: Side, b: Side) -> None:
    for side in (a, b):
        if side.context.codebooks.count > 1:
            raise UsageError(f"{side.name} has several codebooks", hint="Compare models of text")
    if a.vocabulary != b.vocabulary:
        raise UsageError(
            f"A has {a.vocabulary:,} tokens in its vocabulary and B has {b.vocabulary:,}",
            hint="Only models of one vocabulary can be compared",
        )


def _source(a: Side, text: Path | None, tokens: int, seed: int | None) -> Source:
    factory = a.context.factory
    found = text_source(factory.checkpoint, text)
    return found or random_source(factory.config, tokens, seed)


def _check(source: Source, cut: list[Window], vocabulary: int) -> None:
    """Raise `UsageError` for a text that gives no position, or has a token that models have not."""
    if not cut:
        raise UsageError(f"{source.what} has one token", hint="Give a longer text")
    if (last := max(max(each.ids + each.targets) for each in cut)) >= vocabulary:
        raise UsageError(
            f"the tokenizer of A gives token {last}, and its vocabulary has {vocabulary:,}",
            hint="Fetch the checkpoint again",
        )


def _about(side: Side) -> AboutSide:
    dtype = str(side.context.dtype).removeprefix("torch.")
    return AboutSide(side.name, side.context.device.type, dtype, dict(side.settings), [])


def _keep(side: Side, cut: list[Window], stored: StoredLogits, facts: list[str]) -> None:
    """Write a side's logits; its model is free when this has returned."""
    with side.opened(facts) as logits:
        for window in cut:
            stored.append(_rows(side, logits, window))


def _compared(side: Side, cut: list[Window], stored: StoredLogits, facts: list[str]) -> RowFigures:
    parts, start = [], 0
    with side.opened(facts) as logits:
        for window in cut:
            count = len(window.targets)
            rows, targets = _rows(side, logits, window), torch.tensor(window.targets)
            parts.append(
                compare_rows(stored.read(start, count), rows, targets, side.context.device)
            )
            start += count
    return RowFigures.joined(parts)


def _rows(side: Side, logits: Logits, window: Window) -> torch.Tensor:
    """Return the logits of a window's positions that are compared, [positions, vocabulary]."""
    rows = logits(window.ids)[-len(window.targets) :]
    if rows.shape[-1] != side.vocabulary:
        raise OnboardError(
            f"{side.name} computes {rows.shape[-1]:,} logits, and its config says {side.vocabulary:,}",
            hint="Only models of one vocabulary can be compared",
        )
    return rows


def _perplexity(loss: torch.Tensor) -> float | None:
    mean = float(loss.mean())
    return math.exp(mean) if mean < 700.0 else None


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
