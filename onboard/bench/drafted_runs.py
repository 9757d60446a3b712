"""Decoding with drafts of which a chosen share is right, beside decoding without: what drafts bring
at a rate of acceptance, whatever a model's weights are.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from onboard.bench.measure import Run, greedy, run_batch
from onboard.bench.shape import Shape
from onboard.runtime.engine import Engine
from onboard.runtime.scheduling.request import Request
from onboard.runtime.speculation.drafter import Drafter
from onboard.runtime.speculation.head_drafter import HeadDrafter
from onboard.runtime.speculation.ngram import NgramDrafter

_RECORDINGS = (0.0, 1.0)
"""Chances of the drafts of runs that find the answers: the first knows none, and where other sizes of
a step round logits otherwise, a later one's count.
"""


@dataclass(frozen=True)
class Drafting:
    """How drafts are simulated."""

    acceptance: float
    """The chance of each token of a draft to be right, if those before it are."""
    num_tokens: int
    """Of a draft."""


class SimulatedDrafts:
    """Drafts what a request will get, or something else. The drafter `beside` it proposes all the same,
    for its time and for the lengths of drafts.
    """

    def __init__(self, drafting: Drafting, beside: Drafter | None, seed: int) -> None:
        self.chance = drafting.acceptance
        self.answers: dict[tuple[int, ...], list[int]] = {}
        """Prompt -> what comes after it."""
        self._most, self._beside, self._random = drafting.num_tokens, beside, random.Random(seed)

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return a draft for each request."""
        counts = [self._most] * len(requests)
        if self._beside is not None:
            counts = [len(draft) for draft in self._beside.propose(requests)]
        return [self._draft(each, count) for each, count in zip(requests, counts, strict=True)]

    def _draft(self, request: Request, count: int) -> list[int]:
        """Return tokens of the answer up to one that is wrong, as all behind it then are."""
        known = self.answers.get(tuple(request.prompt), [])[request.num_generated :][:count]
        right = 0
        while right < len(known) and self._random.random() < self.chance:
            right += 1
        # 0 and 1 are tokens of every model, and one of them is not the answer
        wrong = [int(token == 0) for token in known[right:]]
        return known[:right] + wrong + [0] * (count - len(known))


@dataclass(frozen=True)
class DraftedRuns:
    """What was measured of one shape with drafts."""

    drafting: Drafting
    runs: list[Run]
    drafted: int
    accepted: int

    def as_dict(self, plain: Sequence[Run]) -> dict[str, Any]:
        """Return the figures, beside those of runs without drafts."""
        most, chance = self.drafting.num_tokens, self.drafting.acceptance
        rates = {"tokens_per_second": self.runs, "plain_tokens_per_second": plain}
        found: dict[str, Any] = {
            name: statistics.median(decode_rate(run) for run in runs)
            for name, runs in rates.items()
        }
        steps = [step for run in self.runs for step in run.decode_steps]
        return {
            "acceptance": chance,
            "num_tokens": most,
            "accepted_share": self.accepted / self.drafted if self.drafted else 0.0,
            "expected_share": sum(chance**place for place in range(1, most + 1)) / most,
            "step_ms": 1e3 * statistics.fmean(steps) if steps else None,
            **found,
            "ratio": found["tokens_per_second"] / found["plain_tokens_per_second"],
        }


def decode_rate(run: Run) -> float:
    """Return tokens a second, all requests together, after each has its first one."""
    begin = max(run.first_tokens)
    later = sum(time > begin for times in run.tokens for time in times)
    return later / (run.duration - begin)


def without_drafts(engine: Engine) -> Engine:
    """Return an engine over the same graph and caches that drafts nothing."""
    return replace(engine, drafter=None)


def measure_drafts(
    engine: Engine, shape: Shape, drafting: Drafting, *, vocabulary: int, seed: int, repeats: int
) -> DraftedRuns:
    """Measure one shape with simulated drafts; the engine's own drafter computes some beside them,
    unless it only looks texts up.
    """
    beside = None if isinstance(engine.drafter, NgramDrafter) else engine.drafter
    if isinstance(beside, HeadDrafter):
        drafting = replace(drafting, num_tokens=beside.most)
    drafts = SimulatedDrafts(drafting, beside, seed)
    drafting_engine = replace(engine, drafter=drafts)
    prompts = shape.prompts(vocabulary, seed)
    for drafts.chance in (*_RECORDINGS, drafting.acceptance):  # the last run warms up
        drafts.answers = _answers(drafting_engine, prompts, shape.output)
    stats = drafting_engine.stats
    before = stats.drafted_tokens, stats.accepted_tokens
    runs = [run_batch(drafting_engine, prompts, shape.output) for _ in range(repeats)]
    drafted, accepted = stats.drafted_tokens - before[0], stats.accepted_tokens - before[1]
    return DraftedRuns(drafting, runs, drafted, accepted)


def _answers(
    engine: Engine, prompts: Sequence[Sequence[int]], output: int
) -> dict[tuple[int, ...], list[int]]:
    requests = [request for prompt in prompts for request in engine.submit(prompt, greedy(output))]
    engine.run()
    return {tuple(request.prompt): request.generated for request in requests}
