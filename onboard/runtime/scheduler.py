"""Which tokens of which sequences the next step computes: continuous batching over a paged cache.

Continuous batching follows Yu et al. 2022 ("Orca"), chunked prefill Agrawal et al. 2023 ("Sarathi"), preemption by
recomputation Kwon et al. 2023 ("PagedAttention").
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from onboard.graph.cache import PageAllocator
from onboard.graph.sequence import IntArray
from onboard.runtime.prompt_inputs import PromptInputs
from onboard.runtime.rope import LengthDependentRope
from onboard.runtime.sampling import SamplingParams

FinishReason = Literal["stop", "length"]


@dataclass(eq=False)
class Request:
    """One output while it is generated."""

    prompt: list[int]
    params: SamplingParams
    generator: np.random.Generator
    tokens: list[int] = field(init=False)
    """The prompt and what was generated so far."""
    num_cached: int = 0
    """Leading tokens whose keys and values are in the cache."""
    pages: list[int] = field(default_factory=list)
    """Grows until `release` empties it."""
    logprobs: list[dict[int, float]] = field(default_factory=list)
    text: str = ""
    """The generated text, set at the end."""
    finish_reason: FinishReason | None = None
    given: PromptInputs | None = None
    """What the prompt has beside its tokens."""
    last_step: int = -1
    slot: int = 0
    """Where its recurrent states lie while it runs."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self._page_row = np.zeros(0, dtype=np.int32)

    def page_row(self) -> IntArray:
        """Return the pages as an array."""
        if len(self._page_row) != len(self.pages):
            self._page_row = np.array(self.pages, dtype=np.int32)
        return self._page_row

    def release(self) -> list[int]:
        """Forget pages and cached tokens; return the pages."""
        pages, self.pages, self.num_cached = self.pages, [], 0
        self._page_row = self._page_row[:0]
        return pages

    def fitting(self, length: int) -> int:
        """Return how many of the next `length` tokens may come in one step: no block of the prompt is taken apart."""
        return length if self.given is None else self.given.fitting(self.num_cached, length)

    @property
    def generated(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[len(self.prompt) :]

    @property
    def num_generated(self) -> int:
        """How many tokens were generated."""
        return len(self.tokens) - len(self.prompt)

    @property
    def num_pending(self) -> int:
        """Known tokens that are not cached yet."""
        return len(self.tokens) - self.num_cached


@dataclass(slots=True)
class Chunk:
    """The next `length` uncached tokens of a sequence."""

    sequence: Request
    length: int

    @property
    def completes(self) -> bool:
        """Whether the last row's logits choose the sequence's next token."""
        return self.length == self.sequence.num_pending

    def reads_given(self) -> bool:
        """Whether some of its tokens have rows from outside."""
        given = self.sequence.given
        return given is not None and self.sequence.num_cached < len(given)


@dataclass
class Step:
    """One forward pass; `rope_length` as in `SequenceInfo.set_batch`."""

    rope_length: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, chunk: Chunk) -> None:
        """Append a chunk."""
        self.chunks.append(chunk)
        self.num_tokens += chunk.length

    def token_ids(self) -> IntArray:
        """Return the new tokens of all chunks, one after the other."""
        starts = ((chunk.sequence.tokens, chunk.sequence.num_cached, chunk.length) for chunk in self.chunks)
        return np.array([token for tokens, start, length in starts for token in tokens[start : start + length]])

    def starts(self) -> IntArray:
        """Return each sequence's number of cached tokens."""
        return np.array([chunk.sequence.num_cached for chunk in self.chunks])

    def has_given(self) -> bool:
        """Whether some of its tokens have rows from outside."""
        return any(chunk.reads_given() for chunk in self.chunks)

    def position_ids(self) -> IntArray | None:
        """Return the tokens' positions for the model where they are not their places; None where all are."""
        if all(chunk.sequence.given is None for chunk in self.chunks):
            return None
        return np.concatenate([_positions(chunk) for chunk in self.chunks])

    def lengths(self) -> IntArray:
        """Return each chunk's number of tokens."""
        return np.array([chunk.length for chunk in self.chunks])

    def slots(self) -> IntArray:
        """Return where each sequence's recurrent states lie."""
        return np.array([chunk.sequence.slot for chunk in self.chunks])

    def pages(self) -> IntArray:
        """Return each sequence's pages, filled up with the spare page 0."""
        rows = [chunk.sequence.page_row() for chunk in self.chunks]
        table = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
        for target, row in zip(table, rows, strict=True):
            target[: len(row)] = row
        return table


def _positions(chunk: Chunk) -> IntArray:
    start, given = chunk.sequence.num_cached, chunk.sequence.given
    return np.arange(start, start + chunk.length) if given is None else given.positions(start, chunk.length)


class Scheduler:
    """Admits, advances, preempts and retires sequences; the caller runs the steps and appends the tokens."""

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        page_size: int,
        max_batch_size: int,
        max_num_tokens: int,
        rope: LengthDependentRope | None = None,
    ) -> None:
        self.allocator = allocator
        self.slots = PageAllocator(max_batch_size + 1)
        self.page_size = page_size
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.rope = rope
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """In order of admission: the last one is preempted first."""
        self.num_preemptions = 0
        self.num_steps = 0

    @property
    def busy(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Request) -> None:
        """Queue a sequence; it must fit the cache when it is alone there."""
        self.waiting.append(sequence)

    def schedule(self) -> Step:
        """Return the next step: running sequences first, oldest first, then newly admitted ones."""
        assert self.busy
        step = self._fill(Step(self._next_table()))
        while not step.chunks:  # the sequence whose turn it was has been preempted
            step = self._fill(Step(self._next_table()))
        for chunk in step.chunks:
            chunk.sequence.last_step = self.num_steps
        self.num_steps += 1
        return step

    def complete(self, chunk: Chunk) -> None:
        """Record that a chunk's keys and values are in the cache."""
        chunk.sequence.num_cached += chunk.length

    def append(self, sequence: Request, token: int) -> None:
        """Append a generated token; a sequence that outgrows its rotary table is computed anew with the next one."""
        sequence.tokens.append(token)
        if self.rope and self._table(sequence) != self.rope.table(len(sequence.tokens) - 1):
            sequence.num_cached = 0

    def finish(self, sequence: Request, reason: FinishReason) -> None:
        """Retire a sequence and free its pages."""
        sequence.finish_reason = reason
        self.running.remove(sequence)
        self._release(sequence)

    def abort(self) -> None:
        """Drop every sequence."""
        for sequence in self.running:
            self._release(sequence)
        self.running.clear()
        self.waiting.clear()

    def _fill(self, step: Step) -> Step:
        for sequence in list(self.running):
            if sequence.pages:  # it may have been preempted meanwhile
                self._advance(sequence, step)
        self._admit(step)
        return step

    def _advance(self, sequence: Request, step: Step) -> None:
        """Put the next chunk of a running sequence into the step, if the step and the cache have room."""
        length = sequence.fitting(min(sequence.num_pending, self.max_num_tokens - step.num_tokens))
        if length and self._table(sequence) == step.rope_length and self._reserve(sequence, length):
            step.add(Chunk(sequence, length))

    def _admit(self, step: Step) -> None:
        """Start waiting sequences in order while the batch, the step and the cache have room for all they know."""
        while step.num_tokens < self.max_num_tokens and self._admissible():
            if self._table(self.waiting[0]) != step.rope_length:
                return
            sequence = self.waiting.popleft()
            sequence.pages = self.allocator.take(self._pages_for(len(sequence.tokens)))
            (sequence.slot,) = self.slots.take(1)
            self.running.append(sequence)
            self._advance(sequence, step)

    def _admissible(self) -> bool:
        if not self.waiting or len(self.running) >= self.max_batch_size:
            return False
        return self._pages_for(len(self.waiting[0].tokens)) <= self.allocator.num_free

    def _reserve(self, sequence: Request, length: int) -> bool:
        """Give the sequence pages for `length` more tokens, preempting the latest ones; False: it was preempted."""
        missing = self._pages_for(sequence.num_cached + length) - len(sequence.pages)
        while missing > self.allocator.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        if missing > 0:
            sequence.pages += self.allocator.take(missing)
        return True

    def _preempt(self, sequence: Request) -> None:
        """Take a sequence's pages away; it computes its tokens again when it is admitted next."""
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _release(self, sequence: Request) -> None:
        self.allocator.give_back(sequence.release())
        self.slots.give_back([sequence.slot])
        sequence.slot = 0

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _table(self, sequence: Request) -> int:
        return self.rope.table(len(sequence.tokens)) if self.rope else 0

    def _next_table(self) -> int:
        """Return the rotary table of the next step: that of the sequence that has waited longest for one."""
        if self.rope is None:
            return 0
        candidates = [*self.running, *([self.waiting[0]] if self._admissible() else [])]
        return self._table(min(candidates, key=lambda sequence: sequence.last_step))
