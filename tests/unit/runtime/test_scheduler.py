"""The scheduler against a plain simulation: whatever the order, every sequence sees its own tokens in order."""

from __future__ import annotations

import random

import numpy as np
import pytest

from onboard.graph.cache import PageAllocator
from onboard.runtime.rope import LengthDependentRope
from onboard.runtime.sampling import SamplingParams
from onboard.runtime.scheduler import Request, Scheduler, Step

PAGE = 4


def _scheduler(pages: int = 40, **options: object) -> Scheduler:
    settings = {"page_size": PAGE, "max_batch_size": 4, "max_num_tokens": 16, **options}
    return Scheduler(PageAllocator(pages), **settings)


def _request(prompt_length: int, max_tokens: int = 8) -> Request:
    prompt = [random.randrange(1000) for _ in range(prompt_length)]
    return Request(prompt, SamplingParams(max_tokens=max_tokens), np.random.default_rng(0))


def _next_token(tokens: list[int]) -> int:
    return hash(tuple(tokens)) % 1000


class _Cache:
    """What a paged cache would hold: (page, offset) -> token. A step must find all earlier tokens of a sequence.

    A recurrent state holds a sequence's tokens in its slot; it is empty where a sequence begins.
    """

    def __init__(self) -> None:
        self.states: dict[int, list[int]] = {}
        self.slots: dict[tuple[int, int], int] = {}

    def run(self, scheduler: Scheduler, step: Step) -> None:
        tokens = iter(step.token_ids().tolist())
        for chunk, start, length, pages in zip(
            step.chunks, step.starts(), step.lengths(), step.pages().tolist(), strict=True
        ):
            for position in range(start, start + length):
                self.slots[pages[position // PAGE], position % PAGE] = next(tokens)
            found = [self.slots[pages[i // PAGE], i % PAGE] for i in range(start + length)]
            assert found == chunk.sequence.tokens[: start + length]
            slot = chunk.sequence.slot
            assert 1 <= slot <= scheduler.max_batch_size
            self.states[slot] = (self.states[slot] if start else []) + found[start:]
            assert self.states[slot] == found
            assert 0 not in pages[: -(-(start + length) // PAGE)]
        assert next(tokens, None) is None
        for chunk in step.chunks:
            completes = chunk.completes
            scheduler.complete(chunk)
            if completes:
                _advance(scheduler, chunk.sequence)


def _advance(scheduler: Scheduler, request: Request) -> None:
    scheduler.append(request, _next_token(request.tokens))
    if len(request.generated) == request.params.max_tokens:
        scheduler.finish(request, "length")


def _run(scheduler: Scheduler, requests: list[Request]) -> list[tuple[list[int], list[int], int]]:
    """Run everything; return each step's starts, lengths and rotary table."""
    cache, steps = _Cache(), []
    for request in requests:
        scheduler.add(request)
    while scheduler.busy:
        step = scheduler.schedule()
        assert 0 < step.num_tokens <= scheduler.max_num_tokens
        assert len(step.chunks) <= scheduler.max_batch_size
        owned = [page for request in scheduler.running for page in request.pages]
        assert len(owned) == len(set(owned))
        steps.append((step.starts().tolist(), step.lengths().tolist(), step.rope_length))
        cache.run(scheduler, step)
        assert len(steps) < 10_000
    return steps


def _assert_right(requests: list[Request]) -> None:
    for request in requests:
        tokens = list(request.prompt)
        for _ in range(request.params.max_tokens):
            tokens.append(_next_token(tokens))
        assert request.tokens == tokens


@pytest.mark.parametrize(
    ("pages", "rope"),
    [
        (200, None),
        (12, None),
        (200, LengthDependentRope(9)),
        (12, LengthDependentRope(9)),
    ],
)
def test_random_loads_finish_with_every_token_in_place(pages: int, rope: LengthDependentRope | None) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    random.seed(seed)
    for _ in range(20):
        scheduler = _scheduler(pages, rope=rope)
        requests = [_request(random.randrange(1, 30), random.randrange(1, 14)) for _ in range(9)]
        steps = _run(scheduler, requests)
        _assert_right(requests)
        assert scheduler.allocator.num_free == pages - 1
        assert scheduler.slots.num_free == scheduler.max_batch_size
        if rope is not None:
            assert any(table for _, _, table in steps)


def test_a_tight_pool_preempts_the_last_admitted_and_it_goes_on_next() -> None:
    scheduler = _scheduler(pages=5)
    first, second, third = _request(7, 6), _request(8, 6), _request(4, 2)
    _run_until_preempted(scheduler, [first, second, third])
    assert scheduler.num_preemptions == 1
    assert scheduler.running == [first]
    assert list(scheduler.waiting) == [second, third]
    assert second.num_cached == 0


def _run_until_preempted(scheduler: Scheduler, requests: list[Request]) -> None:
    cache = _Cache()
    for request in requests:
        scheduler.add(request)
    while not scheduler.num_preemptions:
        cache.run(scheduler, scheduler.schedule())


def test_decoding_goes_on_while_a_long_prompt_is_prefilled_in_chunks() -> None:
    scheduler, cache = _scheduler(), _Cache()
    short, long = _request(3, 8), _request(50, 2)
    scheduler.add(short)
    cache.run(scheduler, scheduler.schedule())
    scheduler.add(long)
    lengths = []
    while long.num_cached < 50:
        step = scheduler.schedule()
        lengths.append(step.lengths().tolist())
        cache.run(scheduler, step)
    assert lengths == [[1, 15], [1, 15], [1, 15], [1, 5]]


def test_a_step_holds_one_rotary_table_and_both_sides_get_their_turn() -> None:
    scheduler = _scheduler(rope=LengthDependentRope(10))
    steps = _run(scheduler, [_request(4, 5), _request(12, 5)])
    assert [table for _, _, table in steps] == [0, 11] * 5


def test_a_sequence_that_outgrows_its_table_is_computed_anew() -> None:
    scheduler = _scheduler(rope=LengthDependentRope(6))
    steps = _run(scheduler, [_request(4, 6)])
    work = [(start, length, table) for [start], [length], table in steps]
    assert work == [(0, 4, 0), (4, 1, 0), (5, 1, 0), (0, 7, 7), (7, 1, 7), (8, 1, 7)]
