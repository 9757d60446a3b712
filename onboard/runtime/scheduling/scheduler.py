"""The scheduler: decides which tokens of which requests the next step computes (continuous batching
over a paged KV cache).

Continuous batching follows Yu et al. 2022 ("Orca"), chunked prefill Agrawal et al. 2023
("Sarathi"), preemption by recomputation Kwon et al. 2023 ("PagedAttention").

Requests have a strict order, by priority and then by arrival. The first unfinished request is never
preempted and is part of every step for its rotary table, so that one request always makes progress.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter

import numpy as np

from onboard.cache.step_buffer import MOST_ROWS
from onboard.errors import OnboardError
from onboard.runtime.length_dependent_rope import LengthDependentRope
from onboard.runtime.scheduling.decode_run import DecodeRun
from onboard.runtime.scheduling.request import Chunk, FinishReason, Request, Step
from onboard.runtime.scheduling.sequence_pages import SequencePages

_in_order = attrgetter("order")


class _TokensNeededError(Exception):
    """A sequence would be preempted, and its latest token is known to the device alone."""


class Scheduler:
    """Admits, advances, preempts and retires sequences; the engine launches the steps and hands
    back their tokens.
    """

    def __init__(
        self,
        memory: SequencePages,
        *,
        max_batch_size: int,
        max_num_tokens: int,
        rope: LengthDependentRope | None = None,
    ) -> None:
        self.memory = memory
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.rope = rope
        self.waiting: list[Request] = []
        """Requests without pages, in order."""
        self.running: list[Request] = []
        """Admitted requests, in order; the last one is preempted first."""
        self.has_drafts = False
        """Whether running requests have drafts for the next step."""
        self.num_preemptions = 0
        self.num_steps = 0
        self._num_arrived = self._num_retired = 0
        self._last = Step()
        """The last step; an empty one after slots have changed."""
        self._run: DecodeRun | None = None
        """The current run of decode steps; None after the batch has changed."""

    @property
    def busy(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Request) -> None:
        """Queue a sequence; it must fit in the cache on its own."""
        sequence.order = sequence.priority, self._num_arrived
        sequence.table = self._table(sequence)
        self._num_arrived += 1
        insort(self.waiting, sequence, key=_in_order)

    def schedule(self) -> Step:
        """Return the next step: chunks of the running sequences, in order, then of newly admitted
        ones.
        """
        assert self.busy
        step = self._fill(Step(self._next_table()))
        while not step.chunks:  # the only candidate has been preempted to make room
            if not self.running and self._border() is None:
                raise OnboardError(
                    "the cache has no room for one request", hint="Something else holds its pages"
                )
            step = self._fill(Step(self._next_table()))
        return self._numbered(step)

    def schedule_ahead(self) -> Step | None:
        """Return the step after one whose tokens have not arrived yet; None if they must be known
        first.

        Decode steps need no token values, only their number: input ids are placeholder tokens. The
        values are needed to preempt (the tokens are computed again), so that ends the attempt.
        """
        try:
            step = self._fill(Step(self._next_table()))
        except _TokensNeededError:
            return None
        return self._numbered(step) if step.chunks else None

    def launched(self, step: Step) -> None:
        """Record that a step was launched: its tokens count as cached from now on, and the latest
        token of each sequence is its placeholder until `append` gets the real one.
        """
        rows, slots = self.memory.rows, step.rows.slots
        ends = rows.num_cached[slots] + (1 if step.lengths is None else step.lengths)
        rows.num_cached[slots] = ends
        rows.latest[slots] = step.rows.unknown
        step.ends, step.num_retired = ends, self._num_retired
        if (run := self._run_of(step)) is not None:
            run.num_steps += 1
        step.at_limit = bool((ends + 1 >= step.rows.limits).any()) if run is None else run.at_limit

    def settle(self, step: Step) -> None:
        """Record that the input tokens of a launched step are known, before the next step is
        scheduled.

        Only then can full pages be digested for reuse: a digest covers token values.
        """
        run = self._run_of(step)
        for row in self.memory.at_borders(step.ends, step.lengths) if run is None else run.due:
            chunk = step.chunks[row]
            if chunk.sequence.finish_reason is None:
                self.memory.computed(chunk.sequence, chunk.length)

    def append(self, step: Step, tokens: Sequence[int]) -> list[tuple[int, Request]]:
        """Append the tokens that a step chose, one for each sequence; return (index in the step,
        sequence) where a token was appended.

        Sequences that finished or were cancelled meanwhile are left out: their token is dropped. A
        sequence that outgrows its rotary table is computed again with the next table.
        """
        took = step.rows.complete
        if step.num_retired != self._num_retired:
            took = [(row, sequence) for row, sequence in took if sequence.finish_reason is None]
        for row, sequence in took:
            sequence.tokens.append(tokens[row])
        self._keep_latest(step, tokens, took)
        for _, sequence in took if self.rope else ():
            if self._table(sequence) != sequence.table:
                sequence.table = self._table(sequence)
                self.memory.restart(sequence)
        return took

    def _keep_latest(
        self, step: Step, tokens: Sequence[int], took: list[tuple[int, Request]]
    ) -> None:
        """Write the tokens to their rows, unless a later step was already launched.

        A later step has set the row's latest token to its own placeholder, which must stay.
        """
        rows, slots = self.memory.rows, step.rows.slots
        if len(took) == len(slots):  # the usual case
            current: list[int] = np.flatnonzero(rows.num_cached[slots] == step.ends).tolist()
        else:
            current = [row for row, sequence in took if sequence.num_cached == step.ends[row]]
        if current:
            rows.latest[slots[current]] = [tokens[row] for row in current]

    def accept(self, step: Step, chosen: Sequence[Sequence[int]]) -> None:
        """Append what a step with drafts chose, for each chunk the drafts that were right and one
        token more; what it computed of the others does not count as cached.

        Of a sequence with recurrent states, which have read a wrong draft, nothing does: what was
        right is read once more.
        """
        assert step.lengths is not None
        starts, rows = step.ends - step.lengths, self.memory.rows
        for chunk, tokens in zip(step.chunks, chosen, strict=True):
            chunk.length = len(tokens) if chunk.drafts else chunk.length
            if self.memory.end_backup(chunk.sequence, restore=len(tokens) <= len(chunk.drafts)):
                chunk.length = 0
            chunk.sequence.tokens += tokens
        step.lengths = np.array([chunk.length for chunk in step.chunks])
        step.ends = starts + step.lengths
        for row, (slot, end) in enumerate(zip(step.rows.slots, step.ends, strict=True)):
            if step.chunks[row].completes:
                rows.rewind(slot, end, chosen[row][-1])
            if not step.chunks[row].length:
                rows.put(slot, end, step.chunks[row].sequence.tokens[end:])
        self.settle(step)

    def rewind(self, sequence: Request, tokens: Sequence[int], limit: int) -> None:
        """Give a sequence, whose pages nobody reuses, other tokens after its prompt, which all count
        as its prompt then, and another limit; what it has cached of the same tokens stays.
        """
        same, most = len(sequence.prompt), min(len(sequence.tokens), len(tokens))
        while same < most and sequence.tokens[same] == tokens[same]:
            same += 1
        if slot := sequence.slot:
            cached = min(sequence.num_cached, same, len(tokens) - 1)
            self.memory.rows.rewind(slot, cached, tokens[-1])
            self.memory.rows.put(slot, cached, tokens[cached:])
        sequence.prompt, sequence.tokens, sequence.limit = list(tokens), list(tokens), limit
        self._last, self._run = Step(), None

    def forget_windows(self, step: Step) -> None:
        """Free the pages that a prompt's chunks have left behind their windows."""
        for chunk in step.chunks:
            if not chunk.completes:
                self.memory.computed(chunk.sequence, 0)

    def finish(self, sequence: Request, reason: FinishReason) -> None:
        """Retire a running sequence and free its pages."""
        sequence.finish_reason = reason
        self._retire(sequence)

    def cancel(self, sequence: Request) -> bool:
        """Cancel a running or waiting sequence between two steps; return False if it had
        finished.
        """
        if sequence.finish_reason is not None:
            return False
        if sequence.slot:
            self.finish(sequence, "abort")
        else:
            self.waiting.remove(sequence)
            sequence.finish_reason = "abort"
        return True

    def abort(self) -> None:
        """Cancel every sequence."""
        for sequence in [*self.running, *self.waiting]:
            self.cancel(sequence)

    def _numbered(self, step: Step) -> Step:
        for chunk in step.chunks if self.rope else ():
            chunk.sequence.last_step = self.num_steps
        step.follow(self._last)
        self._last = step
        self.num_steps += 1
        if self._run_of(step) is None:
            self._run = self._begun_run(step)
        return step

    def _run_of(self, step: Step) -> DecodeRun | None:
        """Return the current decode run if the step belongs to it."""
        return self._run if self._run is not None and self._run.chunks is step.chunks else None

    def _begun_run(self, step: Step) -> DecodeRun | None:
        """Return the decode run that starts with a step; None if it does not decode all running
        sequences.
        """
        if self.rope or len(step.chunks) != len(self.running) or not step.decodes():
            return None
        memory = self.memory
        return DecodeRun(
            step, memory.rows.num_cached[step.rows.slots], memory.borders, memory.page_size
        )

    def _fill(self, step: Step) -> Step:
        self._make_way()
        if not self._goes_on(step):
            self._advance_all(step)
        self._admit(step)
        return step

    def _goes_on(self, step: Step) -> bool:
        """Make `step` the next decode step of the same batch, the usual case; return False if a
        limit is reached or pages are missing.
        """
        run = self._run
        if run is None or run.at_limit or self.has_drafts:
            return False
        if not all(self.memory.reserve(run.chunks[row].sequence, 1) for row in run.due):
            return False
        step.chunks, step.num_tokens = run.chunks, len(run.chunks)
        return True

    def _advance_all(self, step: Step) -> None:
        """Add the next chunks of the running sequences to the step, in order."""
        running = list(self.running)
        for place, sequence in enumerate(running, start=1):
            length = sequence.length
            if not sequence.slot or length >= sequence.limit or sequence.table != step.rope_length:
                continue  # no slot: preempted by a sequence before it
            pending, budget = sequence.num_pending, self.max_num_tokens - step.num_tokens
            drafted = self._drafted(sequence, step, len(running) - place)
            if drafted is not None:
                step.add_drafted(drafted)
            elif pending == 1 and length <= sequence.room and budget > 0:
                # The fast path for decode, also beside a prompt's chunk
                step.chunks.append(sequence.single)
                step.num_tokens += 1
            elif budget > 0:
                self._advance(sequence, step, pending, running[place:])

    def _advance(
        self, sequence: Request, step: Step, pending: int, later: Sequence[Request]
    ) -> None:
        """Add the next chunk of a running sequence to the step, if the cache has pages for it.

        A prompt's chunk leaves room for the `later` sequences that decode, unless its smallest
        possible chunk would not fit then.
        """
        length = 1
        if pending > 1:
            budget, decoding = (
                self.max_num_tokens - step.num_tokens,
                sum(each.num_pending == 1 for each in later),
            )
            length = self._fitting(sequence, budget - decoding) or self._fitting(sequence, budget)
        if length and (
            sequence.num_cached + length <= sequence.room or self._reserve(sequence, length)
        ):
            step.add(sequence, length, pending)

    def _drafted(self, sequence: Request, step: Step, later: int) -> Chunk | None:
        """Return the next chunk of a sequence with as many drafts as the step and the cache have room
        for beside `later` sequences; None without any.
        """
        if not sequence.drafts:
            return None
        drafts, sequence.drafts = sequence.drafts, []
        room = self.max_num_tokens - step.num_tokens - later - 1
        rows = MOST_ROWS - step.num_drafts - len(self.running)
        most = min(len(drafts), room, rows, sequence.limit - sequence.length - 1)
        length = self.memory.chunk(sequence, 1 + most) if most > 0 else 1
        if length <= 1 or not self.memory.reserve(sequence, length):
            return None
        return Chunk(sequence, length, True, tuple(drafts[: length - 1]))

    def _fitting(self, sequence: Request, budget: int) -> int:
        """Return the size of a sequence's next chunk in a step with room for `budget` tokens."""
        if budget <= 0:
            return 0
        return sequence.fitting(self.memory.chunk(sequence, min(sequence.num_pending, budget)))

    def _admit(self, step: Step) -> None:
        """Admit waiting sequences in order, while the batch and the step have room and the cache
        holds all their tokens.

        A sequence whose next page is being computed by another one in this step waits a step, and
        then reuses it.
        """
        coming: set[bytes] | None = None
        while step.num_tokens < self.max_num_tokens and (border := self._border()) is not None:
            if coming is None:
                step.chunks = step.chunks.copy()  # the steps of a decode run share one list
                coming = set(chain.from_iterable(map(self.memory.completes, step.chunks)))
            sequence = self.waiting[0]
            if sequence.table != step.rope_length or self.memory.awaits(sequence, border) in coming:
                return
            self.waiting.pop(0)
            self.memory.admit(sequence, border)
            self._last, self._run = Step(), None
            insort(self.running, sequence, key=_in_order)
            length = self._fitting(sequence, self.max_num_tokens - step.num_tokens)
            # Otherwise its first chunk comes in the next step
            if length and self.memory.reserve(sequence, length):
                step.add(sequence, length, sequence.num_pending)
                coming.update(self.memory.completes(step.chunks[-1]))

    def _border(self) -> int | None:
        """Return how many cached pages the first waiting sequence would reuse; None if it cannot be
        admitted now.
        """
        if not self.waiting or len(self.running) >= self.max_batch_size:
            return None
        return self.memory.room_for(self.waiting[0])

    def _make_way(self) -> None:
        """Preempt running sequences of lower priority until the first waiting sequence can be
        admitted.
        """
        while (
            self.waiting and self.running and self.waiting[0].priority < self.running[-1].priority
        ):
            if self._border() is not None:
                return
            self._preempt(self.running[-1])

    def _reserve(self, sequence: Request, length: int) -> bool:
        """Allocate pages for `length` more tokens of a sequence, preempting the last sequences;
        return False if it was preempted itself.
        """
        while not self.memory.reserve(sequence, length):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Request) -> None:
        """Preempt a sequence: free its pages and queue it; its tokens are computed again later."""
        if sequence.length > len(sequence.tokens):
            raise _TokensNeededError
        sequence.drafts = []
        self._retire(sequence)
        insort(self.waiting, sequence, key=_in_order)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def _retire(self, sequence: Request) -> None:
        self.running.remove(sequence)
        self.memory.release(sequence)
        self._run = None
        self._num_retired += 1

    def _table(self, sequence: Request) -> int:
        return self.rope.table(len(sequence.tokens)) if self.rope else 0

    def _next_table(self) -> int:
        """Return the rotary table of the next step: that of the sequence whose last step is the
        longest ago.
        """
        if self.rope is None:
            return 0
        candidates = [*self.running, *([self.waiting[0]] if self._border() is not None else [])]
        return min(candidates, key=attrgetter("last_step")).table if candidates else 0
