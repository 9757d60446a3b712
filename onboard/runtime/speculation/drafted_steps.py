"""Steps with drafts: launched with a row of logits for each draft, and taken in as far as the drafts
were right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from onboard.cache.cached_sequence import CachedSequenceInterface
from onboard.cache.step_buffer import IntArray
from onboard.runtime.constraints.adjusted_logits import changed_logits, token_masks
from onboard.runtime.multimodal.image_steps import ImageSteps
from onboard.runtime.scheduling.engine_stats import EngineStats
from onboard.runtime.scheduling.pending_step import PendingStep
from onboard.runtime.scheduling.request import Request, Step
from onboard.runtime.scheduling.scheduler import Scheduler
from onboard.runtime.speculation.drafted_rows import drafted_rows
from onboard.runtime.speculation.drafter import Drafter


@dataclass(frozen=True)
class DraftedSteps:
    """The engine's part for steps with drafts."""

    drafter: Drafter
    gm: nn.Module
    cache: CachedSequenceInterface
    images: ImageSteps
    scheduler: Scheduler
    stats: EngineStats
    vocab_size: float
    """Of the model; a draft model's may be larger."""

    def draft(self) -> None:
        """Ask for drafts for the requests that decode and whose logits nobody changes."""
        running = [
            each
            for each in self.scheduler.running
            if each.num_pending == 1 and each.adjustments is None and each.num_generated
        ]
        for request, drafts in zip(running, self.drafter.propose(running), strict=True):
            unknown = (at for at, token in enumerate(drafts) if token >= self.vocab_size)
            request.drafts = drafts[: next(unknown, len(drafts))]
        self.scheduler.has_drafts = any(request.drafts for request in running)

    def launch(self, step: Step, position_ids: IntArray | None) -> PendingStep:
        """Write a step's numbers, with its drafts as tokens, and launch it."""
        info, rows = self.cache.info, drafted_rows(step)
        for chunk in step.chunks:
            if chunk.drafts:
                self.scheduler.memory.back_up(chunk.sequence)
                read = [chunk.sequence.tokens[-1], *chunk.drafts]
                info.rows.put(chunk.sequence.slot, chunk.sequence.num_cached, read)
        images = step.reads_images()
        info.set_rows(
            step.rows.slots,
            step.lengths,
            position_ids=position_ids,
            logits_rows=rows.places,
            captured=not images,
        )
        tokens, logits = self.cache.next_tokens(self.images.graph(step) if images else self.gm)
        if rows.adjusted:
            own = logits()
            masks = token_masks(rows.adjusted, *own.shape)
            changed = changed_logits(own, rows.adjusted)
            tokens = self.cache.choose_again(own, masks, self.gm, changed)
        self.scheduler.launched(step)
        return PendingStep(
            step, tokens.tolist, logits() if step.rows.wants_logprobs else None, rows
        )

    def take_in(self, pending: PendingStep) -> Iterator[tuple[Request, int, int]]:
        """Wait for a step; yield the tokens that it chose until one has ended its request, each with
        the row of its logits: (request, token, row).
        """
        step, rows = pending.step, pending.drafted
        assert rows is not None
        new = rows.accepted(step, pending.chosen())
        self.stats.drafted_tokens += step.num_drafts
        self.stats.accepted_tokens += sum(len(each) - 1 for each in new if each)
        self.scheduler.accept(step, new)
        for chunk, tokens, first in zip(step.chunks, new, rows.first.tolist(), strict=True):
            chunk.sequence.drop(len(tokens))  # all were there for the digests of its pages
            for row, token in enumerate(tokens, start=first):
                if chunk.sequence.finish_reason is None:
                    yield chunk.sequence, token, row
