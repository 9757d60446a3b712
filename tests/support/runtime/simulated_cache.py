"""A scheduler over a cache that is simulated: which token each page holds, and which tokens each
state has seen.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from onboard.cache.batch import SequenceInfo
from onboard.cache.pages import PageAllocator, PageGroup
from onboard.runtime.length_dependent_rope import LengthDependentRope
from onboard.runtime.sampling_params import SamplingParams
from onboard.runtime.scheduling.request import Request, Step
from onboard.runtime.scheduling.scheduler import Scheduler
from onboard.runtime.scheduling.sequence_pages import SequencePages

PAGE = 4


def make_request(prompt: int | list[int], max_tokens: int = 8, **options: Any) -> Request:
    """Return a request with this prompt, or a random one of this length."""
    tokens = [random.randrange(1000) for _ in range(prompt)] if isinstance(prompt, int) else prompt
    return Request(tokens, SamplingParams(max_tokens=max_tokens), 0, **options)


def next_token(tokens: list[int]) -> int:
    return hash(tuple(tokens)) % 1000


def alone(request: Request) -> list[int]:
    """Return the tokens that a request ends with when nothing goes wrong."""
    tokens = list(request.prompt)
    for _ in range(request.params.max_tokens):
        tokens.append(next_token(tokens))
    return tokens


class Simulation:
    """Runs steps: every token that a query may see must lie in the sequence's pages, and the state
    must have seen all.

    `windows` has an entry a group of pages; `snapshots` None: no recurrent states.
    """

    def __init__(
        self,
        pages: int = 40,
        *,
        windows: tuple[int | None, ...] = (None,),
        snapshots: int | None = None,
        rope: LengthDependentRope | None = None,
        max_batch_size: int = 4,
        max_num_tokens: int = 16,
        reuse: bool = True,
    ) -> None:
        self.info = SequenceInfo(
            max_batch_size=max_batch_size,
            max_seq_len=128,
            max_num_tokens=max_num_tokens,
            page_size=PAGE,
            device=torch.device("cpu"),
            snapshots=snapshots or 0,
        )
        self.info.set_groups(len(windows))
        self.groups = [PageGroup(PageAllocator(pages), window) for window in windows]
        self.memory = SequencePages(
            self.groups,
            self.info.rows,
            page_size=PAGE,
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            reuse=reuse,
            snapshots=snapshots,
            copy_state=self._copy_state,
        )
        self.scheduler = Scheduler(
            self.memory, max_batch_size=max_batch_size, max_num_tokens=max_num_tokens, rope=rope
        )
        self.held: list[dict[int, int]] = [{} for _ in windows]
        """By group: place in the pages -> token."""
        self.states: dict[int, list[int]] = {}
        """Slot -> tokens that its state has seen."""

    def step(self) -> Step:
        """Run the next step, appending the tokens that it chooses."""
        step = self.scheduler.schedule()
        assert 0 < step.num_tokens <= self.scheduler.max_num_tokens
        assert len(step.chunks) <= self.scheduler.max_batch_size
        assert step.rows.slots.tolist() == [chunk.sequence.slot for chunk in step.chunks]
        self.info.set_rows(step.rows.slots, step.lengths, rope_length=step.rope_length)
        self._compute(step)
        self.scheduler.launched(step)
        self.scheduler.settle(step)
        self._check_windows(step)
        self.scheduler.append(step, [next_token(chunk.sequence.tokens) for chunk in step.chunks])
        for _, request in step.rows.complete:
            if request.num_generated == request.params.max_tokens:
                self.scheduler.finish(request, "length")
        self.check()
        return step

    def run(self, requests: list[Request]) -> list[Step]:
        """Run everything; return the steps."""
        for request in requests:
            self.scheduler.add(request)
        steps = []
        while self.scheduler.busy:
            steps.append(self.step())
            assert len(steps) < 10_000
        self.check_nothing_is_held()
        return steps

    def check(self) -> None:
        """Assert the invariants between two steps."""
        self.memory.check()
        scheduler = self.scheduler
        for sequences in (scheduler.running, scheduler.waiting):
            assert sequences == sorted(sequences, key=lambda each: each.order)
        slots = [request.slot for request in scheduler.running]
        assert len({*slots}) == len(slots) == self.memory.slots.num_owned
        assert all(1 <= slot <= scheduler.max_batch_size for slot in slots)
        for index, group in enumerate(self.groups):
            owned = {page for request in scheduler.running for page in request.pages[index] if page}
            assert len(owned) == group.allocator.num_owned

    def check_nothing_is_held(self) -> None:
        """Assert that every page and every slot is free again."""
        self.check()
        for group in self.groups:
            assert group.allocator.num_free == group.allocator.num_usable
        assert self.memory.slots.num_free == self.scheduler.max_batch_size

    def _check_windows(self, step: Step) -> None:
        """Assert that what has left its window is given back at once."""
        for request in (chunk.sequence for chunk in step.chunks):
            for pages, group in zip(request.pages, self.groups, strict=True):
                assert not any(pages[: group.first_key(request.num_cached) // PAGE])

    def _compute(self, step: Step) -> None:
        args = {name: value.tolist() for name, value in self.info.args.items()}
        ends, count = args["cu_seqlens"], len(step.chunks)
        for group in range(len(self.groups)):  # all keys are written before one is read
            mapping = args["slot_mapping" if group == 0 else f"slot_mapping_{group}"]
            self.held[group].update(zip(mapping[: ends[count]], args["input_ids"][0], strict=False))
        for row, chunk in enumerate(step.chunks):
            start, length = chunk.sequence.num_cached, chunk.length
            tokens = chunk.sequence.tokens[: start + length]
            assert args["input_ids"][0][ends[row] : ends[row + 1]] == tokens[start:]
            assert args["position_ids"][0][ends[row] : ends[row + 1]] == list(
                range(start, start + length)
            )
            assert args["kv_lens"][row] == start + length
            slot = args["state_slots"][row]
            assert slot == chunk.sequence.slot
            for group, (held, pool) in enumerate(zip(self.held, self.groups, strict=True)):
                table = args["block_table" if group == 0 else f"block_table_{group}"][row]
                for position in range(pool.first_key(start), start + length):
                    assert table[position // PAGE]
                    assert (
                        held[table[position // PAGE] * PAGE + position % PAGE] == tokens[position]
                    )
            if self.memory.has_states:
                self.states[slot] = (self.states[slot] if start else []) + tokens[start:]
                assert self.states[slot] == tokens

    def _copy_state(self, source: int, target: int) -> None:
        self.states[target] = list(self.states[source])
