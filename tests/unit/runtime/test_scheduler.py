"""The scheduler over a simulated cache: whatever the order, every sequence sees its own tokens in
order.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from onboard.runtime.length_dependent_rope import LengthDependentRope
from onboard.runtime.multimodal.image_inputs import ImageInputs
from onboard.runtime.scheduling.request import Chunk, Request, Step
from tests.support.runtime.simulated_cache import PAGE, Simulation, alone, make_request


@pytest.fixture(autouse=True)
def _seeded() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    random.seed(seed)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without reuse": {"reuse": False},
    "two rotary tables": {"rope": LengthDependentRope(9)},
    "states": {"snapshots": 2},
    "states that are not kept": {"snapshots": 0},
    "a window": {"windows": (6,)},
    "full and windows": {"windows": (None, 5, 9)},
    "full, a window and states": {"windows": (None, 7), "snapshots": 3},
    "all of it": {"windows": (None, 7), "snapshots": 3, "rope": LengthDependentRope(9)},
}


def _random_requests(count: int) -> list[Request]:
    """Some of them begin alike, for a while or to the end."""
    stem = [random.randrange(1000) for _ in range(30)]
    requests = []
    for _ in range(count):
        own = [random.randrange(1000) for _ in range(random.randrange(1, 30))]
        prompt = (stem[: random.choice((0, 0, 8, 11, 20))] + own)[: random.randrange(1, 30)]
        requests.append(
            make_request(prompt, random.randrange(1, 14), priority=random.choice((0, 0, 0, 1, -1)))
        )
    return requests


@pytest.mark.parametrize("pages", [200, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_random_loads_finish_with_every_token_in_place(kind: str, pages: int) -> None:
    reused = preempted = 0
    for _ in range(8):
        simulation = Simulation(pages, **KINDS[kind])
        requests = _random_requests(9)
        steps = simulation.run(requests)
        assert all(request.tokens == alone(request) for request in requests)
        if "rope" in KINDS[kind]:
            assert any(step.rope_length for step in steps)
        reused += simulation.memory.stats.reused_tokens
        preempted += simulation.scheduler.num_preemptions
    # These need few pages
    assert bool(preempted) == (pages == 12) or KINDS[kind].get("windows") == (6,)
    assert bool(reused) == simulation.memory.reuse


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_arrive_and_are_cancelled_at_any_time_lose_nothing(kind: str) -> None:
    for _ in range(4):
        simulation = Simulation(14, **KINDS[kind])
        queue, open_requests, done = _random_requests(25), [], []
        while queue or simulation.scheduler.busy:
            while queue and random.random() < 0.4:
                open_requests.append(queue.pop())
                simulation.scheduler.add(open_requests[-1])
            if open_requests and random.random() < 0.1:
                victim = random.choice(open_requests)
                assert simulation.scheduler.cancel(victim) == (victim not in done)
                assert victim in done or victim.finish_reason == "abort"
            if simulation.scheduler.busy:
                simulation.step()
            done = [request for request in open_requests if request.finish_reason]
        simulation.check_nothing_is_held()
        for request in open_requests:
            assert alone(request)[: len(request.tokens)] == request.tokens
            assert (
                request.finish_reason == "abort"
                or len(request.generated) == request.params.max_tokens
            )


def test_a_tight_pool_preempts_the_last_to_arrive_and_it_goes_on_next() -> None:
    simulation = Simulation(pages=5)
    requests = [make_request(7, 6), make_request(8, 6), make_request(4, 2)]
    first, second, third = requests
    for request in requests:
        simulation.scheduler.add(request)
    while not simulation.scheduler.num_preemptions:
        simulation.step()
    assert simulation.scheduler.num_preemptions == second.num_preemptions == 1
    assert simulation.scheduler.running == [first]
    assert simulation.scheduler.waiting == [second, third]
    assert second.num_cached == 0


def test_what_comes_first_takes_the_place_of_what_can_wait() -> None:
    simulation = Simulation(pages=7, max_batch_size=2)
    late, early, urgent = (
        make_request(9, 9, priority=1),
        make_request(9, 9, priority=1),
        make_request(9, 3),
    )
    for request in (late, early):
        simulation.scheduler.add(request)
    simulation.step()
    simulation.scheduler.add(urgent)
    simulation.step()
    assert simulation.scheduler.running == [urgent, late]
    assert urgent.num_generated == 1
    assert simulation.scheduler.waiting == [early]


def test_decoding_goes_on_while_a_long_prompt_is_prefilled_in_chunks() -> None:
    simulation = Simulation()
    short, long = make_request(3, 8), make_request(50, 2)
    simulation.scheduler.add(short)
    simulation.step()
    simulation.scheduler.add(long)
    lengths = []
    while long.num_cached < 50:
        lengths.append([chunk.length for chunk in simulation.step().chunks])
    assert lengths == [[1, 15], [1, 15], [1, 15], [1, 5]]


def test_a_long_prompt_that_came_first_leaves_room_for_those_that_decode() -> None:
    simulation = Simulation()
    short, long = make_request(3, 8, priority=1), make_request(40, 2)
    simulation.scheduler.add(short)
    simulation.step()
    simulation.scheduler.add(long)
    lengths = []
    while long.num_cached < 40:
        lengths.append({chunk.sequence: chunk.length for chunk in simulation.step().chunks})
    assert lengths[1:] == [{long: 15, short: 1}, {long: 10, short: 1}]


def test_a_step_holds_one_rotary_table_and_both_sides_get_their_turn() -> None:
    simulation = Simulation(rope=LengthDependentRope(10))
    steps = simulation.run([make_request(4, 5), make_request(12, 5)])
    assert [step.rope_length for step in steps] == [0, 11] * 5


def test_a_sequence_that_outgrows_its_table_is_computed_anew() -> None:
    simulation = Simulation(rope=LengthDependentRope(6))
    request, work = make_request(4, 6), []
    simulation.scheduler.add(request)
    while simulation.scheduler.busy:
        start = request.num_cached
        step = simulation.step()
        work.append((start, step.num_tokens, step.rope_length))
    assert work == [(0, 4, 0), (4, 1, 0), (5, 1, 0), (0, 7, 7), (7, 1, 7), (8, 1, 7)]


def test_a_second_request_computes_only_what_it_does_not_share() -> None:
    simulation = Simulation()
    stem = list(range(2 * PAGE + 1))
    first, second, same = (
        make_request([*stem, 50], 2),
        make_request([*stem, 60, 61], 2),
        make_request([*stem, 50], 2),
    )
    simulation.run([first])
    assert [step.num_tokens for step in simulation.run([second])] == [
        len(second.prompt) - 2 * PAGE,
        1,
    ]
    simulation.run([same])
    assert (first.num_reused, second.num_reused, same.num_reused) == (0, 2 * PAGE, 2 * PAGE)
    assert simulation.memory.stats.prefix_hits == 2


def test_requests_that_begin_alike_at_once_compute_the_beginning_once() -> None:
    simulation = Simulation(max_num_tokens=64)
    stem = list(range(3 * PAGE))
    requests = [make_request([*stem, 50 + i], 2) for i in range(3)]
    assert [step.num_tokens for step in simulation.run(requests)] == [len(stem) + 1, 3, 2]


def test_the_pages_of_a_whole_prompt_are_reused_but_its_last_token_is_computed() -> None:
    simulation = Simulation()
    prompt = list(range(2 * PAGE))
    simulation.run([make_request(prompt, 1)])
    again = make_request(prompt, 1)
    simulation.run([again])
    assert again.num_reused == PAGE


def test_pages_are_forgotten_when_others_need_them_those_used_last_at_last() -> None:
    simulation = Simulation(pages=1 + 6)
    old, new = list(range(100, 109)), list(range(200, 209))
    for prompt in (old, new):
        simulation.run([make_request(prompt, 1)])  # two full pages each stay
    # Four pages: two free ones, then the oldest two
    simulation.run([make_request(list(range(300, 315)), 1)])
    assert simulation.groups[0].allocator.num_evicted == 2
    found = [make_request(prompt, 1) for prompt in (new, old)]
    for request in found:
        simulation.run([request])
    assert [request.num_reused for request in found] == [2 * PAGE, 0]


def test_states_are_kept_where_prompts_branch_off_and_at_their_last_page() -> None:
    simulation = Simulation(snapshots=4, max_num_tokens=64)
    stem = list(range(5 * PAGE + 2))
    tails = ([100] * 7, [200] * 7, [300] * 7)
    requests = [make_request(stem + tail, 1) for tail in tails]
    lengths = [[step.num_tokens for step in simulation.run([request])] for request in requests]
    assert lengths[0] == [28, 1]  # nothing is known of what will branch off
    assert lengths[1] == [20, 8, 1]  # here the first one did
    assert lengths[2] == [8, 1]
    assert [request.num_reused for request in requests] == [0, 0, 5 * PAGE]


def test_only_the_pages_that_a_window_sees_are_held_and_needed_again() -> None:
    simulation = Simulation(windows=(6,), max_num_tokens=8)
    request = make_request(40, 2)
    simulation.scheduler.add(request)
    most = 0
    while simulation.scheduler.busy:
        simulation.step()
        most = max(most, simulation.groups[0].allocator.num_owned)
    assert most <= 3
    assert simulation.memory.stats.most_pages <= 4  # a chunk of two pages, and the window before it
    again = make_request(request.prompt, 1)
    simulation.run([again])
    assert again.num_reused == 36


def test_a_window_pool_smaller_than_a_step_makes_shorter_steps() -> None:
    simulation = Simulation(pages=1 + 4, windows=(6,), max_num_tokens=32)
    requests = [make_request(40, 3), make_request(30, 3)]
    simulation.run(requests)
    assert all(request.tokens == alone(request) for request in requests)
    assert simulation.memory.capacity > 10**9


def test_a_chunk_completes_the_pages_that_it_fills_and_no_later_ones() -> None:
    simulation = Simulation()
    request = make_request(5 * PAGE + 1, 1)
    simulation.memory.admit(request, 0)
    for length, pages in ((PAGE - 1, 0), (2 * PAGE + 1, 2), (5 * PAGE + 1, 5)):
        digests = simulation.memory.completes(Chunk(request, length, False))
        assert len(digests) == pages
        assert digests == simulation.memory.completes(Chunk(request, 5 * PAGE, False))[:pages]
    simulation.memory.rows.num_cached[request.slot] = 2 * PAGE
    assert len(simulation.memory.completes(Chunk(request, 2 * PAGE, False))) == 2


def test_a_request_longer_than_what_is_free_of_a_window_is_admitted() -> None:
    """It needs what a query sees and a step brings, three pages and a half, of the five that there
    are.
    """
    simulation = Simulation(pages=1 + 5, windows=(6,), max_num_tokens=8)
    first = make_request(2, 4)
    simulation.scheduler.add(first)
    simulation.step()
    assert simulation.groups[0].allocator.num_owned == 1
    assert simulation.memory.room_for(make_request(100, 1)) == 0


def test_a_block_that_fits_into_no_step_with_those_that_decode_has_one_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = Simulation(max_num_tokens=8)
    image, others = make_request(4 + 8 + 2, 2), [make_request(1, 6), make_request(1, 6)]

    def fitting(self: Request, length: int) -> int:
        """The tokens from the fifth to the twelfth come together."""
        end = self.num_cached + length
        return max(0, 4 - self.num_cached) if self is image and 4 < end < 12 else length

    monkeypatch.setattr(Request, "fitting", fitting)
    steps = simulation.run([image, *others])
    chunks = [chunk.length for step in steps for chunk in step.chunks if chunk.sequence is image]
    assert chunks[:2] == [4, 8]
    assert all(request.tokens == alone(request) for request in (image, *others))


def test_a_request_waits_for_a_slot_and_for_what_others_compute_in_full() -> None:
    memory, request = Simulation(max_batch_size=1).memory, make_request(2 * PAGE + 1, 1)
    memory.admit(request, 0)
    assert memory.room_for(make_request(1)) is None
    pages = memory.completes(Chunk(request, 2 * PAGE + 1, False))
    assert [memory.awaits(request, border) for border in range(3)] == [*pages, None]
    assert Simulation(reuse=False).memory.awaits(make_request(2 * PAGE + 1), 0) is None


def test_a_window_with_a_page_at_either_end_bounds_no_sequence() -> None:
    assert Simulation(pages=1 + 3, windows=(2 * PAGE,)).memory.capacity == 3 * PAGE
    assert Simulation(pages=1 + 4, windows=(2 * PAGE,)).memory.capacity > 10**9


def test_a_sequence_that_is_computed_anew_has_nothing_of_before() -> None:
    memory, request = Simulation().memory, make_request(3 * PAGE, 1)
    memory.admit(request, 0)
    memory.completes(Chunk(request, 3 * PAGE, False))
    request.branch, request.tokens = PAGE, [*request.tokens, 7]
    memory.restart(request)
    assert (request.branch, request.digests, request.pages, request.room) == (0, [], [[]], 0)
    assert request.num_admitted == 3 * PAGE + 1
    assert memory.num_owned == 0


def test_the_state_behind_a_prompt_of_whole_pages_is_kept() -> None:
    simulation = Simulation(snapshots=4)
    prompt = list(range(2 * PAGE))
    longer = make_request([*prompt, 50, 51, 52], 1)
    for request in (make_request(prompt, 1), longer):
        simulation.run([request])
    assert longer.num_reused == 2 * PAGE


def test_positions_of_a_step_follow_what_came_with_the_prompts() -> None:
    """An image whose three tokens have two places: what comes after it is one place nearer, from
    its first step on.
    """
    image = ImageInputs(embeds=torch.zeros(4, 2), place=np.array([0, 1, 1, 2]), after=-1)
    rows: Any = SimpleNamespace(num_cached=np.array([0, 4, 5, 2]))  # by slot
    requests = []
    for slot, given in ((1, image), (2, None), (3, image)):
        requests.append(make_request(9))
        requests[-1].slot, requests[-1].rows, requests[-1].image_inputs = slot, rows, given
    after, text, inside = requests
    later, now = Step(), Step()
    for request in (after, text):
        later.add(request, 1, 2)
        now.add(request, 1, 2)
    now.add(inside, 3, 4)
    assert (later.reads_images(), now.reads_images()) == (False, True)
    assert list(later.position_ids()) == [3, 5]
    assert later.position_ids(shifted=True) is None, (
        "whoever adds the shifts reads the tokens' places"
    )
    assert list(now.position_ids()) == [3, 5, 1, 2, 3]
    assert list(now.position_ids(shifted=True)) == [4, 5, 2, 3, 4]
    plain = Step()
    plain.add(text, 1, 2)
    assert plain.position_ids() is None
