"""Requests, and steps: one forward pass over chunks of the running requests' tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from onboard.cache.rows import SequenceRows
from onboard.cache.step_buffer import IntArray
from onboard.runtime.constraints.adjustments import Adjustments
from onboard.runtime.multimodal.image_inputs import ImageInputs
from onboard.runtime.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]
"""stop: an end-of-text token, a stop token or a stop text; length: the token limit; abort: the
request was cancelled.
"""


@dataclass(eq=False)
class Request:
    """One output of a prompt, from `submit` until it has finished."""

    prompt: list[int]
    params: SamplingParams
    key: int
    """Key of the request's random numbers (`ops/sampling/sampling.py`)."""
    priority: int = 0
    """Smaller priorities go first; equal ones in the order of arrival."""
    image_inputs: ImageInputs | None = None
    """Image or sound inputs of the prompt; None for text alone."""
    adapter: int = 0
    """0, or 1 + the index of the adapter that its tokens have."""
    tokens: list[int] = field(init=False)
    """The prompt's tokens and those generated so far."""
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] | None = None
    """An entry for each token of the prompt, None for the first; None if they are not wanted."""
    adjustments: Adjustments | None = None
    """What is done to its logits before a token is chosen; None: nothing."""
    given: list[int] = field(default_factory=list)
    """An entry for each generated token that it had when it was queued: the length of the text that
    was certain then.
    """
    text: str = ""
    """The generated text, set when the request finishes."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop text or stop token that ended it; None for an end-of-text token and other ends."""
    limit: int = sys.maxsize
    """Maximum number of tokens, prompt included."""
    last_tokens: frozenset[int] = frozenset()
    """End-of-text and stop tokens: the request ends when one is generated."""
    num_preemptions: int = 0
    num_reused: int | None = None
    """Leading tokens found in the prefix cache at the first admission; None before it."""
    # The scheduler and SequencePages own the fields below.
    order: tuple[int, int] = (0, 0)
    """(priority, arrival): the sort key for admission; the largest is preempted first."""
    num_admitted: int = 0
    """Number of tokens at the last admission: all of them are computed as a prompt."""
    branch: int = 0
    """Leading tokens shared with an earlier request, found at the last admission."""
    pages: list[list[int]] = field(default_factory=list)
    """Page numbers, a list for each group of pages; 0 where a page has left the window."""
    room: int = 0
    """Number of tokens that the allocated pages hold."""
    digests: list[bytes] = field(default_factory=list)
    """One digest for each full page, of its tokens and all tokens before them."""
    table: int = 0
    """Which rotary table the cached keys were computed with: the table's shortest length."""
    slot: int = 0
    """Index of the request's row and of its recurrent states while it runs; 0: not running."""
    backup: int = 0
    """Where its recurrent states lie as they were before a step with drafts; 0: nowhere."""
    rows: SequenceRows | None = None
    """The arrays that hold the row; None before the first admission."""
    last_step: int = -1
    """Number of the last step that computed tokens of the request."""

    drafts: list[int] = field(default_factory=list)
    """Tokens that may come next; the next step checks them."""

    single: Chunk = field(init=False, repr=False)
    """The chunk of one token, shared by all decode steps of the request."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.single = Chunk(self, 1, True)

    def digest_salt(self, start: int, end: int) -> bytes:
        """Bytes mixed into the digest of a page of tokens: the rotary table, the adapter and the
        image inputs.
        """
        images = self.image_inputs
        numbers = self.table.to_bytes(8, "little") + self.adapter.to_bytes(8, "little")
        return numbers + (images.digest(start, end) if images else b"")

    def fitting(self, length: int) -> int:
        """Return how many of the next `length` tokens a step can take without splitting the tokens
        of one image.
        """
        return (
            length
            if self.image_inputs is None
            else self.image_inputs.fitting(self.num_cached, length)
        )

    @property
    def generated(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[len(self.prompt) :]

    def drop(self, count: int) -> None:
        """Take back the last `count` tokens."""
        del self.tokens[len(self.tokens) - count :]

    @property
    def num_generated(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - len(self.prompt)

    @property
    def num_cached(self) -> int:
        """Leading tokens whose keys and values are cached, those of launched steps included."""
        return int(self.rows.num_cached[self.slot]) if self.slot and self.rows is not None else 0

    @property
    def length(self) -> int:
        """Number of tokens, including one that only the device knows so far.

        Each launched step chooses one token more than it caches.
        """
        return max(len(self.tokens), self.num_cached + 1)

    @property
    def num_pending(self) -> int:
        """Number of tokens that are not cached yet; 1 while the latest is on the device alone."""
        return max(len(self.tokens) - self.num_cached, 1)


@dataclass(slots=True, eq=False)
class Chunk:
    """The next `length` uncached tokens of a sequence, drafts included."""

    sequence: Request
    length: int
    completes: bool
    """Whether the chunk ends with the sequence's last token, so that the next one is chosen."""
    drafts: tuple[int, ...] = ()
    """Tokens after the sequence's last one, which the step checks."""

    def reads_images(self) -> bool:
        """Whether the chunk includes precomputed embeddings of images or sound."""
        images = self.sequence.image_inputs
        return images is not None and self.sequence.num_cached < len(images)


@dataclass(frozen=True)
class StepRows:
    """Arrays with an entry for each sequence of a step, independent of the chunks' lengths."""

    slots: IntArray
    """Slot of each sequence."""
    unknown: IntArray
    """Placeholder token of each sequence (`-slot`), for a token that the host has not received."""
    limits: IntArray
    """Maximum number of tokens of each sequence."""
    complete: list[tuple[int, Request]]
    """(index in the step, sequence) where the step chooses the sequence's next token."""
    last_tokens: frozenset[int]
    """End-of-text and stop tokens of all sequences together."""
    has_stops: bool
    """Whether a sequence has stop texts."""
    wants_logprobs: bool
    adjusted: list[tuple[int, Request]]
    """(index in the step, sequence) where logits are changed before a token is chosen."""
    has_images: bool
    """Whether a sequence's prompt has images or sound."""


@dataclass
class Step:
    """One forward pass. `rope_length` is explained in `SequenceInfo.set_batch`."""

    rope_length: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    num_tokens: int = 0
    num_drafts: int = 0
    """Number of drafts in its chunks."""
    num_filling: int = 0
    """Prompt tokens computed in this step, including tokens recomputed after a preemption."""
    ends: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Cached tokens of each sequence after the step; set at launch."""
    num_retired: int = 0
    """The scheduler's count of retired sequences at launch: if it is larger when the tokens arrive,
    some sequence of the step may have ended meanwhile.
    """
    at_limit: bool = False
    """Whether a sequence reaches its token limit with this step; set at launch."""

    def add(self, sequence: Request, length: int, pending: int) -> None:
        """Add a chunk of `length` tokens of a sequence that has `pending` uncached tokens."""
        self.chunks.append(
            sequence.single if pending == 1 else Chunk(sequence, length, length == pending)
        )
        self.num_tokens += length
        if pending > 1:
            self.num_filling += length

    def add_drafted(self, chunk: Chunk) -> None:
        """Add a chunk with drafts."""
        self.chunks.append(chunk)
        self.num_tokens += chunk.length
        self.num_drafts += len(chunk.drafts)

    @cached_property
    def rows(self) -> StepRows:
        """Arrays made from the chunks; read them only after all chunks were added."""
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
            adjusted=[
                (row, chunk.sequence)
                for row, chunk in enumerate(self.chunks)
                if chunk.completes and chunk.sequence.adjustments is not None
            ],
            has_images=any(sequence.image_inputs is not None for sequence in sequences),
        )

    def decodes(self) -> bool:
        """Whether it is a pure decode step: one new token for each sequence."""
        return self.num_tokens == len(self.chunks) == len(self.rows.complete)

    def may_end(self, tokens: Sequence[int]) -> bool:
        """Whether one of the chosen `tokens`, one for each sequence, may end its sequence."""
        return self.at_limit or self.rows.has_stops or not self.rows.last_tokens.isdisjoint(tokens)

    def follow(self, last: Step) -> None:
        """Reuse the arrays of the step before if it has the same chunks; slots must be unchanged
        since then.
        """
        if self.chunks is last.chunks or self.chunks == last.chunks:
            self.rows = last.rows

    @cached_property
    def lengths(self) -> IntArray | None:
        """Number of tokens of each chunk, None when all have one; read it only after all chunks
        were added.
        """
        if self.num_tokens == len(self.chunks):
            return None
        return np.array([chunk.length for chunk in self.chunks])

    def is_live(self) -> bool:
        """Whether a sequence of the step is unfinished."""
        return any(chunk.sequence.finish_reason is None for chunk in self.chunks)

    def reads_images(self) -> bool:
        """Whether some chunk includes precomputed embeddings of images or sound."""
        return self.rows.has_images and any(chunk.reads_images() for chunk in self.chunks)

    def shifts(self) -> IntArray:
        """Return each sequence's position offset: what is added to the index of a token that comes
        after the prompt's images, [sequences] int64.
        """
        images = (chunk.sequence.image_inputs for chunk in self.chunks)
        return np.array([0 if each is None else each.after for each in images])

    def position_ids(self, *, shifted: bool = False) -> IntArray | None:
        """Return the position of each token for the model, [tokens]; None if every position is the
        token's index in its sequence.

        `shifted`: the graph adds each sequence's offset itself, so it is left out here.
        """
        if not (self.reads_images() if shifted else self.rows.has_images):
            return None
        return np.concatenate([_positions(chunk, shifted) for chunk in self.chunks])


def _positions(chunk: Chunk, shifted: bool) -> IntArray:
    start, images = chunk.sequence.num_cached, chunk.sequence.image_inputs
    if images is None:
        return np.arange(start, start + chunk.length)
    return images.positions(start, chunk.length) - (images.after if shifted else 0)
