"""The engine: generates tokens for requests, one step (a forward pass of the cached graph) at a
time.

Who waits for whom. The host runs ahead of the device: it prepares a step's numbers in host memory
and launches the step, and the device works through launched steps in order, on one stream. The host
waits at two places only: before it overwrites the step buffer, for the copy of the step before
(`cache/step_buffer.py`), and for the tokens of a step (`scheduling/pending_step.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from onboard.cache.cached_sequence import CachedSequenceInterface
from onboard.cache.next_token import Chosen
from onboard.errors import UsageError
from onboard.modeling import Codebooks
from onboard.runtime.calls.adapter_numbers import adapter_number
from onboard.runtime.calls.checked_prompt import check_prompt
from onboard.runtime.calls.endings import ending, has_ended_with
from onboard.runtime.calls.prompt_pass import PromptPass
from onboard.runtime.calls.request_texts import RequestTexts
from onboard.runtime.constraints.adjusted_logits import changed_logits, token_masks
from onboard.runtime.constraints.adjustments import wanted_adjustments
from onboard.runtime.constraints.structured import Grammars, Matcher
from onboard.runtime.length_dependent_rope import LengthDependentRope
from onboard.runtime.logprobs import logprobs
from onboard.runtime.multimodal.image_steps import ImageSteps
from onboard.runtime.sampling_params import SamplingParams, stream_key
from onboard.runtime.scheduling.engine_stats import EngineStats
from onboard.runtime.scheduling.pending_step import PendingStep, TokenReceiver
from onboard.runtime.scheduling.request import FinishReason, Request, Step, StepRows
from onboard.runtime.scheduling.scheduler import Scheduler
from onboard.runtime.scheduling.sequence_pages import SequencePages
from onboard.runtime.speculation.drafted_steps import DraftedSteps
from onboard.runtime.speculation.drafter import Drafter
from onboard.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from onboard.runtime.multimodal.own_towers import OwnTowers
    from onboard.runtime.multimodal.towers import Towers


@dataclass
class Engine:
    """One model, ready to run: the cached graph, its caches and the scheduler.

    With `overlap` the next step is launched while the device still computes the current one. The
    host then sees one step late that a request has finished, and drops the extra token: outputs are
    the same either way. `history` (an entry for each transform) and `facts` (fallbacks, skipped
    matches) come from the pipeline.
    """

    gm: nn.Module
    cache: CachedSequenceInterface
    tokenizer: Tokenizer | None = None
    eos_token_ids: frozenset[int] = frozenset()
    vocab_size: int | None = None
    """Prompts may hold token ids below it; None: unknown, so not checked."""
    rope: LengthDependentRope | None = None
    towers: Towers | OwnTowers | None = None
    """The towers of a multimodal model; None: the model takes text alone."""
    adapters: Sequence[str] = ()
    """The names of the adapters that requests may have."""
    reuse: bool = True
    """Whether requests reuse the cached prefix of earlier requests."""
    overlap: bool = False
    """Whether steps are launched ahead. No effect with `rope`: the next step's rotary table depends
    on which requests have finished.
    """
    history: list[Any] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    drafter: Drafter | None = None
    """Who proposes tokens, which steps then check; None: each step chooses one token a request. With
    it no step is launched ahead.
    """
    bytes_read: int = 0
    """Of the checkpoint's files, for the weights; 0 where they are random."""
    together: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered for what other ranks do with this one."""

    def __post_init__(self) -> None:
        info, cache = self.cache.info, self.cache
        self.memory = SequencePages(
            cache.groups,
            info.rows,
            page_size=info.page_size,
            max_batch_size=info.max_batch_size,
            max_num_tokens=info.max_num_tokens,
            reuse=self.reuse,
            snapshots=info.snapshots if cache.has_states else None,
            copy_state=cache.copy_state,
        )
        self.scheduler = Scheduler(
            self.memory,
            max_batch_size=info.max_batch_size,
            max_num_tokens=info.max_num_tokens,
            rope=self.rope,
        )
        self.stats = EngineStats(pages=sum(group.allocator.num_usable for group in cache.groups))
        self._alone = PromptPass(self.gm, cache, self.rope)
        self._receiver = TokenReceiver(cache.latest)
        self._ahead: PendingStep | None = None
        self.texts = RequestTexts(self.tokenizer)
        self.grammars = Grammars(self.tokenizer, self.vocab_size)
        # Position offsets on the device, by slot, and the step whose offsets were written last
        self._shifts = np.zeros(info.num_slots, dtype=np.int64)
        self._shifted: StepRows | None = None
        self._images = ImageSteps(self.gm, cache, self.towers)
        parts = (
            self.gm,
            cache,
            self._images,
            self.scheduler,
            self.stats,
            self.vocab_size or math.inf,
        )
        self._drafted = None if self.drafter is None else DraftedSteps(self.drafter, *parts)

    @property
    def codebooks(self) -> Codebooks:
        """How many codes a token stands for; one for text."""
        return self.cache.info.codebooks

    @property
    def capacity(self) -> int:
        """Maximum number of tokens of one sequence, prompt included."""
        return min(self.cache.info.max_seq_len, self.memory.capacity)

    @property
    def limits(self) -> dict[str, int]:
        """The limits that the engine serves, by their names in the configuration."""
        info = self.cache.info
        return {
            "max_seq_len": self.capacity,
            "max_batch_size": info.max_batch_size,
            "max_num_tokens": info.max_num_tokens,
        }

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        inputs: Mapping[str, Any] | None = None,
        priority: int = 0,
        generated: Sequence[Sequence[int]] = (),
        grammar: Matcher | None = None,
    ) -> list[Request]:
        """Queue a prompt; return its `params.n` requests, which `step` advances.

        `inputs` is the output of transformers' processor for the prompt's images. Requests with a
        smaller `priority` go first, and preempt others when pages run out. `generated`: tokens that
        the outputs have already, each goes on behind its own. `grammar` is what `grammars` have made
        of `params.structured_outputs`; None: it is made here. Raises `UsageError` if
        the prompt is empty, too long, or has a token that the model does not know, and for an
        adapter that there is not.
        """
        self._check_prompt(prompt, room_for=1)
        adapter = adapter_number(self.adapters, params.lora)
        if params.stop and self.tokenizer is None:
            raise UsageError(
                "stop texts need a tokenizer and the checkpoint has none", hint="Use stop_token_ids"
            )
        if self.codebooks.count > 1 and params.adjusts_logits:
            raise UsageError("tokens of several codebooks are drawn as the model says")
        images = self._images.prepare(list(prompt), inputs) if inputs else None
        scores = None
        if params.prompt_logprobs is not None:
            scores = self.prompt_logprobs(prompt, params.prompt_logprobs, params.lora)
        grammar = grammar or self.grammars.matcher(params.structured_outputs)
        keys = [stream_key(params, index) for index in range(params.n)]
        outputs = [Request(list(prompt), params, key, priority, images, adapter) for key in keys]
        for output in outputs:
            most = self.capacity if params.max_tokens is None else len(prompt) + params.max_tokens
            output.limit = min(most, self.capacity)
            output.last_tokens = params.last_tokens(self.eos_token_ids)
            own = grammar and grammar.copy()
            output.adjustments = wanted_adjustments(
                params, self.eos_token_ids, self.vocab_size, self.tokenizer, own
            )
            output.prompt_logprobs = scores
        for output, tokens in zip(outputs, generated or [()] * params.n, strict=True):
            if not has_ended_with(output, tokens, self.texts):
                self.scheduler.add(output)
        return outputs

    def cancel(self, output: Request) -> bool:
        """Cancel a request between two steps and keep its tokens so far; return False if it had
        finished.
        """
        if not self.scheduler.cancel(output):
            return False
        self.stats.cancelled += 1
        self.texts.finish(output)
        return True

    @torch.inference_mode()
    def run(self, on_step: Callable[[Step], None] | None = None) -> None:
        """Step until every request has finished; after an error nothing is left queued."""
        try:
            while self.scheduler.busy:
                step = self.step()
                if on_step is not None:
                    on_step(step)
        finally:
            self.abort()

    def abort(self) -> None:
        """Cancel every request, between two steps."""
        self.scheduler.abort()
        self._ahead = None
        self.texts.clear()

    def step(self) -> Step:
        """Finish one forward pass, and append the tokens that it chose to their requests."""
        # Asking is quicker than entering inference mode again, which `run` has done already.
        if torch.is_inference_mode_enabled():
            with self.together():
                return self._step()
        with torch.inference_mode(), self.together():
            return self._step()

    def _step(self) -> Step:
        start = time.perf_counter()
        # 1. The step to finish: the one launched ahead during the last call, else a new one. One
        # launched ahead is ignored if all its sequences have ended. The device runs it all the
        # same: it writes to freed pages and slots, which later steps write before they read.
        pending = self._ahead if self._ahead is not None and self._ahead.step.is_live() else None
        if self._drafted is not None:
            self._drafted.draft()
        pending = pending or self.launch(self.scheduler.schedule())
        if self._drafted is not None and pending.drafted is not None:
            for request, token, row in self._drafted.take_in(pending):
                self._take(request, token, pending.logits, row)
            self._count(pending.step, time.perf_counter() - start)
            return pending.step
        # The tokens before this step's are known, and with them what its requests may get: the host
        # finds out while the device computes the step.
        if pending.step.rows.adjusted:
            self._choose_again(pending)
        # 2. The tokens that this step reads are known to the host since the last call, so the pages
        # that it fills can be published for reuse, before the next step is scheduled.
        self.scheduler.settle(pending.step)
        # 3. Launch the next step before waiting for this one's tokens: the device always has work.
        # Its input ids are placeholder tokens, which the device replaces by this step's tokens; it
        # runs behind this step on the same stream, so they are there by then.
        may = self.overlap and self.rope is None and self.drafter is None
        self._ahead = self._launch_ahead() if may else None
        # 4. Wait for this step's tokens. The device works on the next step meanwhile.
        self._take_in(pending)
        self._count(pending.step, time.perf_counter() - start)
        return pending.step

    @torch.inference_mode()
    def logits(
        self, input_ids: Sequence[int] | torch.Tensor, lora: str | None = None
    ) -> torch.Tensor:
        """Return what `LLM.logits` does; raise `UsageError` for a prompt that is too long."""
        tokens = torch.as_tensor(input_ids).flatten().tolist()
        self._check_prompt(tokens, room_for=0)
        with self.together():
            return self._alone.logits(tokens, adapter_number(self.adapters, lora))

    @torch.inference_mode()
    def last_logits(
        self, prompts: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return what `LLM.last_logits` does."""
        for prompt in prompts:
            self._check_prompt(prompt, room_for=0)
        with self.together():
            return self._alone.last_logits(prompts, counts)

    def can_read(self, prompt: Sequence[int]) -> bool:
        """Whether running requests leave room to compute a prompt for itself."""
        return self.cache.can_lend([len(prompt)])

    @torch.inference_mode()
    def hidden_states(self, prompt: Sequence[int], lora: str | None = None) -> torch.Tensor:
        """Return the last hidden state of every token, [tokens, hidden] float32 on the CPU.

        Raises `UsageError` if the prompt is too long, running requests leave no room for it, or the
        mode has no graph.
        """
        self._check_prompt(prompt, room_for=0)
        self._check_room(prompt)
        with self.together():
            return self._alone.hidden_states(prompt, adapter_number(self.adapters, lora))

    @torch.inference_mode()
    def prompt_logprobs(
        self, prompt: Sequence[int], count: int, lora: str | None = None
    ) -> list[dict[int, float] | None]:
        """Return for each token of a prompt but the first its log-probability, and those of the
        `count` most likely ones; the prompt is prefilled for that alone.

        Raises `UsageError` if running requests leave no room for it.
        """
        self._check_room(prompt)
        with self.together():
            return self._alone.logprobs(prompt, count, adapter_number(self.adapters, lora))

    def launch(self, step: Step) -> PendingStep:
        """Write a step's numbers and launch it; return without waiting for its tokens."""
        if self.cache.has_shifts:
            self._set_shifts(step)
        positions = step.position_ids(shifted=self.cache.has_shifts)
        if step.num_drafts and self._drafted is not None:
            return self._drafted.launch(step, positions)
        self.cache.info.set_rows(
            step.rows.slots,
            step.lengths,
            rope_length=step.rope_length,
            position_ids=positions,
            captured=not step.reads_images(),
        )
        tokens, logits = self._run(step)
        self.scheduler.launched(step)
        # After the launch, so that the event comes after the kernels that write the tokens; before
        # any later launch, so that waiting for it does not wait for that one, too.
        arriving = self._receiver.receive(tokens, step.rows.slots, step.ends)
        # Logits are a static output of a captured step: cloned before a replay overwrites them.
        kept = logits().clone() if step.rows.wants_logprobs else None
        return PendingStep(step, arriving, kept, of_step=logits)

    def _choose_again(self, pending: PendingStep) -> None:
        """Choose the tokens of the step that was launched last as its requests want them."""
        step = pending.step
        assert pending.of_step is not None
        own, wanted = pending.of_step(), step.rows.adjusted
        masks, changed = token_masks(wanted, *own.shape), changed_logits(own, wanted)
        tokens = self.cache.choose_again(own, masks, self.gm, changed)
        pending.tokens = self._receiver.receive(tokens, step.rows.slots, step.ends)

    def _set_shifts(self, step: Step) -> None:
        """Write the position offsets of a step's sequences to the device, if they have changed."""
        if step.rows is self._shifted:
            return
        wanted, slots = step.shifts(), step.rows.slots
        if (self._shifts[slots] != wanted).any():
            self._shifts[slots] = wanted
            self.cache.shift(slots, wanted)
        self._shifted = step.rows

    def _launch_ahead(self) -> PendingStep | None:
        """Launch the next step before the current one's tokens have arrived; return None if
        scheduling needs them.
        """
        step = self.scheduler.schedule_ahead()
        return None if step is None else self.launch(step)

    def _run(self, step: Step) -> Chosen:
        """Run the graph; record a fact if CUDA graphs were captured and a decode step replayed
        none.
        """
        if step.reads_images():
            return self.cache.next_tokens(self._images.graph(step))
        before = self._replays
        chosen = self.cache.next_tokens(self.gm)
        if (
            self._replays == before
            and hasattr(self.gm, "replays")
            and step.num_tokens == len(step.chunks)
        ):
            fact = f"decode steps of {len(step.chunks)} sequences ran without a CUDA graph"
            if fact not in self.facts:
                self.facts.append(fact)
        return chosen

    @property
    def _replays(self) -> int:
        """CUDA graphs replayed so far, 0 for a graph without captures."""
        return int(getattr(self.gm, "replays", 0))

    def _check_room(self, prompt: Sequence[int]) -> None:
        if not self.can_read(prompt):
            raise UsageError(
                "a prompt that is read for itself needs pages, and running requests have them",
                hint="Ask again later",
            )

    def _check_prompt(self, prompt: Sequence[int], *, room_for: int) -> None:
        check_prompt(prompt, self.vocab_size, self.capacity, room_for=room_for)

    def _count(self, step: Step, seconds: float) -> None:
        stats, memory = self.stats, self.memory.stats
        stats.steps += 1
        stats.seconds += seconds
        stats.prompt_tokens += step.num_filling
        stats.steps_ahead += self._ahead is not None
        stats.preemptions = self.scheduler.num_preemptions
        stats.prefix_hits, stats.reused_tokens = memory.prefix_hits, memory.reused_tokens
        stats.state_snapshots, stats.most_pages = memory.state_snapshots, memory.most_pages
        stats.graph_replays = self._replays

    def _take_in(self, pending: PendingStep) -> None:
        """Wait for a step's tokens, append them, and finish the sequences that end with them."""
        step, tokens = pending.step, pending.chosen()
        took = self.scheduler.append(step, tokens)
        if pending.logits is not None:
            for row, sequence in took:
                if (most := sequence.params.logprobs) is not None:
                    rows = pending.logits[row : row + 1]
                    sequence.logprobs += logprobs(rows, [tokens[row]], most, self.codebooks)
        for _, sequence in took if step.may_end(tokens) else ():
            self._end(sequence)
        for row, sequence in step.rows.adjusted:
            assert sequence.adjustments is not None
            end = sequence.adjustments.took(tokens[row]) if sequence.finish_reason is None else None
            if end is not None:
                self._finish(sequence, end)
        self.stats.generated_tokens += len(took)
        self.stats.dropped_tokens += len(step.rows.complete) - len(took)

    def _take(self, sequence: Request, token: int, logits: torch.Tensor | None, row: int) -> None:
        """Append a token, and finish the sequence if that ends it."""
        sequence.tokens.append(token)
        self.stats.generated_tokens += 1
        if logits is not None and (most := sequence.params.logprobs) is not None:
            chosen = logits[row : row + 1]
            sequence.logprobs += logprobs(chosen, [token], most, self.codebooks)
        self._end(sequence)
        if sequence.adjustments is not None and sequence.finish_reason is None:
            end = sequence.adjustments.took(token)
            if end is not None:
                self._finish(sequence, end)

    def _end(self, sequence: Request) -> None:
        """Finish a sequence if its latest token ends it."""
        if (end := ending(sequence, self.texts)) is not None:
            self._finish(sequence, *end)

    def _finish(self, sequence: Request, reason: FinishReason, by: str | int | None = None) -> None:
        sequence.stop_reason = by
        self.scheduler.finish(sequence, reason)
        self.texts.finish(sequence)
