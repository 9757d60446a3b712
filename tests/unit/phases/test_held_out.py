from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from onboard.content import CONTENT_ROOT
from onboard.verify.held_out import HELD_OUT, judge, mean_nll, stories


def test_loss_is_the_mean_over_what_follows_the_first_token_of_each() -> None:
    logits = [torch.randn(5, 11, dtype=torch.float64), torch.randn(3, 11, dtype=torch.float64)]
    ids = [[3, 1, 4, 1, 5], [9, 2, 6]]
    losses = [
        -float(logits[k][i].log_softmax(-1)[ids[k][i + 1]])
        for k in (0, 1)
        for i in range(len(ids[k]) - 1)
    ]
    assert mean_nll(logits, ids) == pytest.approx(sum(losses) / 6, rel=1e-9)
    assert mean_nll([torch.zeros(5, 11)], ids[:1]) == pytest.approx(math.log(11))


def test_stories_are_told_apart_by_their_separator(tmp_path: Path) -> None:
    assert stories(tmp_path) == [HELD_OUT]
    (tmp_path / "heldout.txt").write_text(
        "One.\n\nTwo --- three.\n---\n\n---\nFour.\n", encoding="utf-8"
    )
    assert stories(tmp_path) == ["One.\n\nTwo --- three.", "Four."]
    assert len(stories(CONTENT_ROOT / "onboard" / "assets" / "demo")) == 60


@pytest.mark.parametrize(
    ("nll", "verdict"), [(2.0, "equal"), (2.004, "equal"), (2.006, "different"), (1.9, "different")]
)
def test_verdicts(nll: float, verdict: str) -> None:
    judged = judge(nll, 2.0, allowed=0.005)
    assert judged.verdict == verdict
    assert "transformers' 7.389" in judged.reason


@pytest.mark.parametrize("nll", [math.nan, math.inf])
def test_what_is_no_number_is_no_equal(nll: float) -> None:
    judged = judge(nll, nll, allowed=1.0)
    assert (judged.verdict, judged.perplexity) == ("different", None)
    assert "not a number" in judged.reason
