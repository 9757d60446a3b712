"""KL divergence and agreement, by hand and against float64 numpy."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from onboard.errors import NotFiniteError, UsageError
from onboard.verify.divergence import row_figures, stored_logits
from onboard.verify.divergence.divergence import summary
from onboard.verify.divergence.row_figures import RowFigures, compare_rows
from onboard.verify.divergence.stored_logits import StoredLogits

CPU = torch.device("cpu")


def compared(a: torch.Tensor, b: torch.Tensor, targets: list[int]) -> RowFigures:
    return compare_rows(a, b, torch.tensor(targets), CPU)


def test_by_hand() -> None:
    a = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0]]).log()
    b = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]]).log()
    # Logits mean the same when a number is added to a row
    found = compared(a + torch.tensor([[3.0], [-2.0]]), b, [1, 0])
    assert found.divergence.tolist() == pytest.approx([0.25 * math.log(2), 0.5 * math.log(2)])
    assert found.same_best.tolist() == [0, 1]
    assert found.loss_a.tolist() == pytest.approx([math.log(4), math.log(2)])
    assert found.loss_b.tolist() == pytest.approx([math.log(2), math.log(2)])
    assert found.divergence.dtype == torch.float64


def test_the_first_is_what_the_second_is_measured_by() -> None:
    sure, open_ = torch.tensor([[0.0, -math.inf]]), torch.tensor([[0.0, 0.0]])
    assert compared(sure, open_, [0]).divergence.tolist() == pytest.approx([math.log(2)])
    figures = summary(compared(open_, sure, [0]))
    assert (figures.mean, figures.p99, figures.largest) == (None, None, None)
    assert figures.perplexity_a == pytest.approx(2)


def test_against_numpy_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = int(torch.randint(2**31, ()))
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    a, noise = torch.randn(2, 23, 17, generator=generator) * 4
    b = a + 0.2 * noise
    targets = torch.randint(17, (23,), generator=generator)
    monkeypatch.setattr(row_figures, "_NUMBERS", 17 * 5)
    found = compare_rows(a, b, targets, CPU)

    p, q = (
        np.exp(x) / np.exp(x).sum(-1, keepdims=True)
        for x in (a.double().numpy(), b.double().numpy())
    )
    expected = (p * (np.log(p) - np.log(q))).sum(-1)
    np.testing.assert_allclose(found.divergence, expected, rtol=1e-9)
    first, second = (np.argsort(-x, axis=-1, kind="stable") for x in (p, q))
    np.testing.assert_array_equal(found.same_best, first[:, 0] == second[:, 0])
    shared = [len({*x[:5]} & {*y[:5]}) / 5 for x, y in zip(first, second, strict=True)]
    np.testing.assert_allclose(found.same_five, shared)
    assert 0 < found.same_five.mean() < 1

    figures = summary(found)
    assert figures.mean == pytest.approx(expected.mean())
    assert figures.p99 == pytest.approx(np.percentile(expected, 99))
    assert figures.largest == pytest.approx(expected.max())
    losses = -np.log(q[np.arange(23), targets.numpy()])
    assert figures.perplexity_b == pytest.approx(np.exp(losses.mean()))


def test_of_equal_logits_none_is_better() -> None:
    a = torch.tensor([[1.0, 1.0, 0.0]])
    assert compared(a, torch.tensor([[0.0, 1.0, 0.0]]), [0]).same_best.tolist() == [1]
    assert compared(a, torch.tensor([[0.0, 0.0, 1.0]]), [0]).same_best.tolist() == [0]


def test_the_same_is_nothing_away() -> None:
    a = torch.randn(40, 50_000) * 5
    figures = summary(compared(a, a.clone(), [0] * 40))
    assert (figures.mean, figures.largest, figures.top1, figures.top5) == (0, 0, 1, 1)
    # Float32 would round the divergence of what differs by this to anything
    close = summary(compared(a, a + 1e-5 * torch.randn(a.shape), [0] * 40))
    assert close.mean is not None
    assert 0 < close.mean < 1e-9


def test_what_is_no_number_is_refused() -> None:
    a = torch.zeros(3, 4)
    b = a.clone()
    b[1, 2] = math.nan
    with pytest.raises(NotFiniteError, match="not numbers"):
        summary(compared(a, b, [0, 0, 0]))


def test_logits_wait_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(7, 5)
    stored = StoredLogits(tmp_path, 7, 5)
    stored.append(rows[:4])
    stored.append(rows[4:])
    assert torch.equal(stored.read(0, 7), rows)
    assert torch.equal(stored.read(3, 2), rows[3:5])
    monkeypatch.setattr(stored_logits, "MOST_BYTES", 4 * 7 * 5 - 1)
    with pytest.raises(UsageError, match="Lower --tokens"):
        StoredLogits(tmp_path, 7, 5)
