"""A request while it is generated, and the steps that compute some of its tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from onboard.cache.rows import SequenceRows
from onboard.cache.step_buffer import IntArray
from onboard.runtime.multimodal.prompt_inputs import PromptInputs
from onboard.runtime.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]
"""stop: an end or stop token or text; length: no more tokens were wanted or possible; abort: it was
cancelled.
"""


@dataclass(eq=False)
class Request:
    """One output while it is generated."""

    prompt: list[int]
    params: SamplingParams
    key: int
    """Of its random numbers (`ops/sampling/sampling.py`)."""
    priority: int = 0
    """Smaller ones go first; among equals, those that arrived first."""
    given: PromptInputs | None = None
    """Image or sound inputs of the prompt; None for text alone."""
    tokens: list[int] = field(init=False)
    """The prompt and what was generated so far."""
    logprobs: list[dict[int, float]] = field(default_factory=list)
    text: str = ""
    """The generated text, set at the end."""
    finish_reason: FinishReason | None = None
    limit: int = sys.maxsize
    """Most tokens that it can have, prompt included."""
    last_tokens: frozenset[int] = frozenset()
    """Tokens that end it."""
    num_preemptions: int = 0
    num_reused: int | None = None
    """Leading tokens that were found in the cache when it started; None: it has not."""
    # What follows belongs to the scheduler and to the cache's memory.
    order: tuple[int, int] = (0, 0)
    """Priority and arrival: who goes first, and last loses its pages."""
    num_admitted: int = 0
    """Tokens that were known when it was admitted last."""
    branch: int = 0
    """Leading tokens that it had in common with earlier requests then."""
    pages: list[list[int]] = field(default_factory=list)
    """By group of pages; 0 where a page has left the window."""
    room: int = 0
    """Tokens for which it has pages."""
    digests: list[bytes] = field(default_factory=list)
    """One a full page: of its tokens and all before them."""
    table: int = 0
    """The rotary table that its digests stand for, by its shortest length."""
    slot: int = 0
    """Its row, and where its recurrent states lie, while it runs; 0: it does not."""
    rows: SequenceRows | None = None
    """Where its row is, once it has run."""
    last_step: int = -1

    single: Chunk = field(init=False, repr=False)
    """Its chunk in every step that computes its last token alone."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.single = Chunk(self, 1, True)

    def digest_salt(self) -> bytes:
        """Bytes mixed into the first page's digest: the rotary table and the image inputs."""
        return self.table.to_bytes(8, "little") + (
            self.given.digest if self.given is not None else b""
        )

    def fitting(self, length: int) -> int:
        """Return how many of the next `length` tokens fit in one step without splitting an image's
        block of tokens.
        """
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
    def num_cached(self) -> int:
        """Leading tokens whose keys and values are cached, or will be when the launched steps have
        run.
        """
        return int(self.rows.num_cached[self.slot]) if self.slot and self.rows is not None else 0

    @property
    def length(self) -> int:
        """Tokens that it has, those that only the device knows included: a cached one has another
        behind it.
        """
        return max(len(self.tokens), self.num_cached + 1)

    @property
    def num_pending(self) -> int:
        """Tokens that are not cached yet."""
        return max(len(self.tokens) - self.num_cached, 1)


@dataclass(slots=True, eq=False)
class Chunk:
    """The next `length` uncached tokens of a sequence."""

    sequence: Request
    length: int
    completes: bool
    """Whether the last row's logits choose the sequence's next token."""

    def reads_given(self) -> bool:
        """Whether the chunk includes precomputed embeddings of images or sound."""
        given = self.sequence.given
        return given is not None and self.sequence.num_cached < len(given)


@dataclass(frozen=True)
class StepRows:
    """Per-sequence arrays of a step that do not depend on how long its chunks are."""

    slots: IntArray
    """Each sequence's row."""
    unknown: IntArray
    """Placeholder input id per row (`-slot`) for a token that the host has not received yet."""
    limits: IntArray
    """Most tokens that each can have."""
    complete: list[tuple[int, Request]]
    """The sequences whose next token is chosen, and their places."""
    last_tokens: frozenset[int]
    """Tokens that end some of the sequences."""
    has_stops: bool
    """Whether some end with a text."""
    wants_logprobs: bool
    some_given: bool
    """Whether some of the sequences have more than tokens."""


@dataclass
class Step:
    """One forward pass; `rope_length` as in `SequenceInfo.set_batch`."""

    rope_length: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    num_tokens: int = 0
    num_filling: int = 0
    """Prompt tokens computed in this step, including tokens recomputed after a preemption."""
    ends: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Cached tokens of each sequence after the step; set when it is launched."""
    num_retired: int = 0
    """Sequences that had retired when it was started."""
    at_limit: bool = False
    """Whether a sequence reaches its token limit with this step; set when the step is launched."""

    def add(self, sequence: Request, length: int, pending: int) -> None:
        """Append the next `length` tokens of a sequence of which `pending` are not cached."""
        self.chunks.append(
            sequence.single if pending == 1 else Chunk(sequence, length, length == pending)
        )
        self.num_tokens += length
        if pending > 1:
            self.num_filling += length

    @cached_property
    def rows(self) -> StepRows:
        """What follows from the chunks; to be read when all are there."""
        sequences = [chunk.sequence for chunk in self.chunks]
        slots = np.array([sequence.slot for sequence in sequences])
        return StepRows(
            slots=slots,
            unknown=-slots,
            limits=np.array([sequence.limit for sequence in sequences]),
            complete=[
                (row, chunk.sequence) for row, chunk in enumerate(self.chunks) if chunk.completes
            ],
            last_tokens=frozenset().union(*(sequence.last_tokens for sequence in sequences)),
            has_stops=any(sequence.params.stop for sequence in sequences),
            wants_logprobs=any(sequence.params.logprobs is not None for sequence in sequences),
            some_given=any(sequence.given is not None for sequence in sequences),
        )

    def decodes(self) -> bool:
        """Whether it is a pure decode step: one new token for each sequence."""
        return self.num_tokens == len(self.chunks) == len(self.rows.complete)

    def may_end(self, tokens: Sequence[int]) -> bool:
        """Whether one of the `tokens` that it chose, one a row, may be the last of its sequence."""
        return self.at_limit or self.rows.has_stops or not self.rows.last_tokens.isdisjoint(tokens)

    def follow(self, last: Step) -> None:
        """Take over what followed from the chunks of a step in which every sequence had the slot
        that it has now.
        """
        if self.chunks is last.chunks or self.chunks == last.chunks:
            self.rows = last.rows

    @cached_property
    def lengths(self) -> IntArray | None:
        """Each chunk's number of tokens, None when all have one; to be read when all chunks are
        there.
        """
        if self.num_tokens == len(self.chunks):
            return None
        return np.array([chunk.length for chunk in self.chunks])

    def is_live(self) -> bool:
        """Whether some of its sequences are unfinished."""
        return any(chunk.sequence.finish_reason is None for chunk in self.chunks)

    def has_given(self) -> bool:
        """Whether some chunk includes precomputed embeddings of images or sound."""
        return self.rows.some_given and any(chunk.reads_given() for chunk in self.chunks)

    def shifts(self) -> IntArray:
        """Return what is added to the positions of each sequence's tokens behind all that was given
        with its prompt.
        """
        given = (chunk.sequence.given for chunk in self.chunks)
        return np.array([0 if each is None else each.after for each in given])

    def position_ids(self, *, shifted: bool = False) -> IntArray | None:
        """Return the tokens' positions for the model where they are not their places; None where
        all are.

        `shifted`: whoever gets them adds its sequence's shift to each.
        """
        if not (self.has_given() if shifted else self.rows.some_given):
            return None
        return np.concatenate([_positions(chunk, shifted) for chunk in self.chunks])


def _positions(chunk: Chunk, shifted: bool) -> IntArray:
    start, given = chunk.sequence.num_cached, chunk.sequence.given
    if given is None:
        return np.arange(start, start + chunk.length)
    return given.positions(start, chunk.length) - (given.after if shifted else 0)
