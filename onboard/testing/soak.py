"""A soak of the engine: very many random requests, none of which may notice the others.

Requests arrive, are cancelled, stop, share beginnings and lose their pages to each other at random;
every answer has to be the one that the same request gets alone, and no page and no slot may be
lost. Draws come from a seed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from onboard.runtime.engine import Engine
from onboard.runtime.sampling_params import SamplingParams
from onboard.runtime.scheduling.request import Request
from onboard.runtime.speculation.head_drafter import HeadDrafter

Question = tuple[tuple[int, ...], SamplingParams]


@dataclass
class SoakReport:
    """What a soak did, and what went wrong."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    refused: int = 0
    """Requests that can never fit: they were refused when they came."""
    tokens: int = 0
    """In all answers."""
    steps: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    """Answers that differ from those alone."""


def in_double(engine: Engine) -> Engine:
    """Turn a model on the CPU and its caches to float64; return the engine.

    Matrix products round differently in batches of different sizes. In float64 that is too little
    to change a token.
    """
    engine.gm.double()
    if isinstance(engine.drafter, HeadDrafter):
        for head in engine.drafter.heads:
            head.gm.double()
    cache = engine.cache
    cache.caches = {name: tensor.double() for name, tensor in cache.caches.items()}
    return engine


class Soak:
    """Random requests to `engine`, whose answers `alone` (an engine with room for one request at a
    time) knows.
    """

    def __init__(
        self,
        engine: Engine,
        alone: Engine,
        *,
        questions: int,
        seed: int,
        cancel_share: float = 0.05,
    ) -> None:
        self.engine = engine
        self.report = SoakReport()
        self._alone = alone
        self._answers: dict[int, list[int]] = {}
        self._random = random.Random(seed)
        self._cancel_share = cancel_share
        self._open: list[tuple[int, Request]] = []
        vocab = engine.vocab_size
        assert vocab is not None
        stems = [self._tokens(vocab, 40) for _ in range(6)]
        self._questions = [self._question(vocab, stems) for _ in range(questions)]

    def run(
        self,
        requests: int,
        on_step: Callable[[SoakReport], None] | None = None,
        go_on: Callable[[], bool] = lambda: True,
    ) -> SoakReport:
        """Send `requests` requests and wait for all answers; assert the invariants on the way and
        at the end.

        No more are sent once `go_on` says False.
        """
        report, draw, begin = self.report, self._random, time.perf_counter()
        while (sending := report.requests < requests and go_on()) or self._open:
            most = draw.choice((1, 8, 40)) if sending else 0  # quiet and busy times
            while report.requests < requests and len(self._open) < most and draw.random() < 0.9:
                self._submit(draw.randrange(len(self._questions)))
            if self._open and draw.random() < self._cancel_share:
                self._cancel(draw.choice(self._open)[1])
            if self.engine.scheduler.busy:
                self.engine.step()
                report.steps += 1
            self._collect()
            if report.steps % 16 == 0:
                self.check()
            if on_step is not None:
                on_step(report)
        report.seconds = time.perf_counter() - begin
        self.check()
        self.check_nothing_is_held()
        return report

    def check(self) -> None:
        """Assert that every page and slot is free, kept or owned by a running request."""
        memory, scheduler = self.engine.memory, self.engine.scheduler
        memory.check()
        assert memory.slots.num_owned == len(scheduler.running)
        for index, group in enumerate(memory.groups):
            owned = {page for request in scheduler.running for page in request.pages[index] if page}
            assert len(owned) == group.allocator.num_owned, "a page is owned by no running request"

    def check_nothing_is_held(self) -> None:
        """Assert that nothing is left over when no request is."""
        memory = self.engine.memory
        assert not self.engine.scheduler.busy
        for allocator in (memory.slots, *(group.allocator for group in memory.groups)):
            assert allocator.num_free == allocator.num_usable, "a page or a slot is lost"

    def answer(self, index: int) -> list[int]:
        """Return what a question is answered alone."""
        if index not in self._answers:
            prompt, params = self._questions[index]
            [output] = self._alone.submit(list(prompt), params)
            self._alone.run()
            self._answers[index] = output.generated
        return self._answers[index]

    def expected(self, output: Request) -> list[int]:
        """Return what a request that is on its way is going to get."""
        return self.answer(next(index for index, own in self._open if own is output))

    def add(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Ask one question more, beside those that were drawn."""
        self._questions.append((tuple(prompt), params))

    def _submit(self, index: int) -> None:
        prompt, params = self._questions[index]
        priority = self._random.choice((0, 0, 0, 0, 1, -1))
        [output] = self.engine.submit(list(prompt), params, priority=priority)
        self._open.append((index, output))
        self.report.requests += 1

    def _cancel(self, output: Request) -> None:
        assert self.engine.cancel(output)
        assert not self.engine.cancel(output), "cancelled twice"

    def _collect(self) -> None:
        """Compare what is finished with the answers alone."""
        report = self.report
        for index, output in self._open:
            if output.finish_reason is None:
                continue
            expected, found = self.answer(index), output.generated
            whole = output.finish_reason != "abort"
            report.finished += whole
            report.cancelled += not whole
            report.tokens += len(found)
            if found != (expected if whole else expected[: len(found)]):
                report.wrong.append(f"request {index}: {found}, alone: {expected}")
        self._open = [
            (index, output) for index, output in self._open if output.finish_reason is None
        ]

    def _question(self, vocab: int, stems: list[tuple[int, ...]]) -> Question:
        draw = self._random
        stem = draw.choice(stems)[: draw.choice((0, 0, 5, 16, 23, 40))]
        prompt = stem + self._tokens(vocab, draw.choice((1, 2, 5, 9, 20)))
        sampled = {
            "temperature": draw.uniform(0.5, 1.5),
            "top_k": draw.choice((0, 20)),
            "seed": draw.randrange(1000),
        }
        params = SamplingParams(
            max_tokens=draw.choice((1, 2, 4, 7, 12, 20)),
            stop_token_ids=draw.sample(range(vocab), 3) if draw.random() < 0.3 else [],
            **(sampled if draw.random() < 0.5 else {"temperature": 0.0}),
        )
        return prompt, params

    def _tokens(self, vocab: int, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(vocab) for _ in range(count))


def soak_figures(engine: Engine, report: SoakReport) -> str:
    """Return one line a figure, for a note."""
    stats = engine.stats
    lines = {
        "requests": f"{report.requests} ({report.finished} finished, {report.cancelled} cancelled)",
        "answers that differ from the same request alone": len(report.wrong),
        "generated tokens": report.tokens,
        "steps": f"{report.steps} in {report.seconds:.0f} s",
        "steps that replayed a CUDA graph": stats.graph_replays,
        "steps started before the tokens of the one before were known": stats.steps_ahead,
        "preemptions": stats.preemptions,
        "prefix hits": f"{stats.prefix_hits}, {stats.reused_tokens} tokens not computed",
        "state snapshots": stats.state_snapshots,
        "pages": f"at most {stats.most_pages} of {stats.pages} in use",
        "torch": torch.__version__,
    }
    return "\n".join(f"{name}: {value}" for name, value in lines.items())
