"""What drafts bring at a rate of acceptance: simulated on a tiny engine, counted and timed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from onboard.bench.drafted_runs import (
    DraftedRuns,
    Drafting,
    SimulatedDrafts,
    decode_rate,
    measure_drafts,
    without_drafts,
)
from onboard.bench.measure import Run
from onboard.bench.shape import Shape
from onboard.cli import main
from onboard.runtime.sampling_params import SamplingParams
from onboard.runtime.scheduling.request import Request
from onboard.testing.soak import in_double
from tests.support.runtime.tiny import Tiny


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_all_drafts_are_right_or_none(llama: Tiny, chance: float) -> None:
    engine = in_double(llama.engine(speculative={"draft": "ngram", "num_tokens": 3}))
    seed, shape = random.randrange(1000), Shape(2, 8, 21)
    found = measure_drafts(engine, shape, Drafting(chance, 3), vocabulary=90, seed=seed, repeats=2)
    assert found.drafted >= 60
    assert found.accepted == chance * found.drafted
    assert len(found.runs) == 2
    steps = [len(run.decode_steps) for run in found.runs]
    assert all(count <= 6 if chance else count >= 20 for count in steps)
    assert engine.stats.drafted_tokens == 0, "the model's own drafter is not counted"
    assert without_drafts(engine).drafter is None
    figures = found.as_dict([Run(2.0, [[1.0, 2.0]], [])])
    assert figures["accepted_share"] == figures["expected_share"] == chance
    assert figures["ratio"] == figures["tokens_per_second"]


class _Counts:
    """Drafts of chosen lengths."""

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        return [[5] * at for at, _ in enumerate(requests)]


def test_drafts_are_answers_up_to_the_first_that_is_wrong() -> None:
    seed = random.randrange(1000)
    print(f"seed {seed}")
    drafts, answer = SimulatedDrafts(Drafting(0.5, 4), None, seed), list(range(2, 3000))
    request = Request([1], SamplingParams(), 0)
    drafts.answers = {(1,): answer}
    right = []
    for at in range(len(answer) - 4):
        [draft] = drafts.propose([request])
        assert len(draft) == 4
        same = [one == other for one, other in zip(draft, answer[at:], strict=False)]
        right.append(next((place for place, each in enumerate(same) if not each), 4))
        assert not any(same[right[-1] :])
        request.tokens.append(answer[at])
    for place in range(4):
        reached = [each for each in right if each >= place]
        share = sum(each > place for each in reached) / len(reached)
        assert share == pytest.approx(0.5, abs=0.15)


def test_the_drafter_beside_says_how_long_drafts_are() -> None:
    drafts = SimulatedDrafts(Drafting(1.0, 4), _Counts(), 0)
    requests = [Request([at], SamplingParams(), 0) for at in range(3)]
    drafts.answers = {(at,): [7, 8, 9] for at in range(2, 3)}
    assert drafts.propose(requests) == [[], [0], [7, 8]]


def test_rates_count_what_comes_after_every_first_token() -> None:
    run = Run(4.0, [[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 3.0]], [])
    assert decode_rate(run) == 2.0
    figures = DraftedRuns(Drafting(0.5, 2), [run], 8, 3).as_dict([Run(6.0, run.tokens, [])])
    assert (figures["accepted_share"], figures["expected_share"]) == (0.375, 0.375)
    assert (figures["ratio"], figures["step_ms"]) == (2.0, None)


def test_the_command_shows_both_rates(
    llama: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", str(llama.checkpoint), "--root", str(llama.root), "--device", "cpu"]
    words += ["--batch", "1", "--context", "8", "--output-len", "12", "--repeats", "1"]
    words += ["--acceptance", "0.7", "--output", str(tmp_path)]
    assert main.run(words) == 0
    assert "accepted" in capsys.readouterr().out
    [result] = json.loads((tmp_path / "bench.json").read_text())["results"]
    found = result["drafts"]
    assert (found["acceptance"], found["num_tokens"]) == (0.7, 4)
    assert found["ratio"] == pytest.approx(
        found["tokens_per_second"] / found["plain_tokens_per_second"]
    )
