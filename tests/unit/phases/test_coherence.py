from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from onboard.agents.coherence import judge, mean_nll, repetition, spectral_excess, weights_excess

GOOD = [[1, 2, 3, 4, 5, 6, 7, 8]]
LOOP = [[5] * 40]
VOCABULARY = 1000


def test_loss_is_the_mean_over_what_follows_the_first_token() -> None:
    logits = torch.randn(5, 11, dtype=torch.float64)
    ids = [3, 1, 4, 1, 5]
    expected = -sum(float(logits[i].log_softmax(-1)[ids[i + 1]]) for i in range(4)) / 4
    assert mean_nll(logits, ids) == pytest.approx(expected, rel=1e-5)
    assert mean_nll(torch.zeros(5, 11), ids) == pytest.approx(math.log(11))


def test_repetition_counts_trigrams_that_came_before() -> None:
    assert repetition(range(10)) == 0
    assert repetition([7] * 12) == pytest.approx(9 / 10)
    assert repetition([1, 2]) == 0


@pytest.mark.parametrize("shape", [(16, 48), (64, 64), (300, 200)])
@pytest.mark.parametrize("distribution", ["normal", "uniform"])
def test_random_matrices_have_no_excess(shape: tuple[int, int], distribution: str) -> None:
    seed = int(torch.randint(2**31, ()))
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    draw = (
        torch.randn if distribution == "normal" else (lambda *s, generator: torch.rand(*s, generator=generator) - 0.5)
    )
    values = [spectral_excess(0.02 * draw(*shape, generator=generator)) for _ in range(20)]
    assert sorted(values)[10] < 0.5
    assert max(values) < 2


def test_one_direction_among_noise_shows() -> None:
    matrix = torch.randn(128, 128) + 0.5 * torch.randn(128, 1) @ torch.randn(1, 128)
    assert spectral_excess(matrix) > 5


def test_the_demo_is_trained_and_a_shuffled_copy_is_not(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from onboard.content import CONTENT_ROOT

    demo = CONTENT_ROOT / "onboard" / "assets" / "demo"
    trained = weights_excess(demo)
    assert trained is not None
    assert trained > 5
    weights = load_file(demo / "model.safetensors")
    shuffled = {
        name: w.flatten()[torch.randperm(w.numel())].view(w.shape) for name, w in weights.items() if w.ndim == 2
    }
    save_file(shuffled, tmp_path / "model.safetensors")
    excess = weights_excess(tmp_path)
    assert excess is not None
    assert excess < 2


@pytest.mark.parametrize(
    ("outputs", "nll", "excess", "reference", "verdict"),
    [
        (GOOD, 2.0, 20.0, None, "coherent"),
        (GOOD, 6.8, 20.0, None, "incoherent"),
        (GOOD, 6.8, 20.0, 3.0, "incoherent"),
        (GOOD, 6.8, 20.0, 6.81, "not judged"),
        (GOOD, 6.9, 0.1, None, "not judged"),
        (GOOD, 6.9, None, None, "not judged"),
        (GOOD, math.nan, 20.0, None, "incoherent"),
        (GOOD, None, 20.0, None, "not judged"),
        (LOOP, 2.0, 20.0, None, "incoherent"),
        ([[], [], [1]], 2.0, 20.0, None, "incoherent"),
    ],
)
def test_verdicts(
    outputs: list[list[int]], nll: float | None, excess: float | None, reference: float | None, verdict: str
) -> None:
    judged = judge(outputs, held_out_nll=nll, vocabulary=VOCABULARY, excess=excess, reference=lambda: reference)
    assert judged.verdict == verdict
    if nll is not None and excess in (None, 0.1):
        assert "weights look random" in judged.reason


def test_the_reference_is_asked_only_when_in_doubt() -> None:
    def fail() -> float:
        raise AssertionError("not needed")

    judge(GOOD, held_out_nll=2.0, vocabulary=VOCABULARY, excess=20.0, reference=fail)
    judge(GOOD, held_out_nll=6.9, vocabulary=VOCABULARY, excess=0.0, reference=fail)
