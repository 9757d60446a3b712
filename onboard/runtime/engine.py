"""The engine: turns requests into tokens, one step of the cached graph at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx, nn

from onboard.cache.cached_sequence import MROPE_DELTA, CachedSequenceInterface
from onboard.cache.next_token import Chosen
from onboard.errors import UsageError
from onboard.graph.cache_init.embedded_inputs import with_given_inputs
from onboard.graph.fx import graph_modules
from onboard.modeling import Codebooks
from onboard.runtime.length_dependent_rope import LengthDependentRope
from onboard.runtime.logprobs import logprobs
from onboard.runtime.multimodal.prompt_inputs import PromptInputs, given_rows
from onboard.runtime.sampling_params import SamplingParams, stream_key
from onboard.runtime.scheduling.pending_step import PendingStep, TokenReceiver
from onboard.runtime.scheduling.request import FinishReason, Request, Step, StepRows
from onboard.runtime.scheduling.scheduler import Scheduler
from onboard.runtime.scheduling.sequence_pages import SequencePages
from onboard.runtime.tokenizer import Detokenizer, Tokenizer

if TYPE_CHECKING:
    from onboard.runtime.multimodal.towers import Composite

_LOGITS_CHUNK = 256
"""Tokens whose logits `logits` computes at a time: rows of the vocabulary's size are large."""


@dataclass
class EngineStats:
    """What the engine has done so far."""

    steps: int = 0
    prompt_tokens: int = 0
    """Tokens computed to fill the cache, recomputation after preemption included."""
    generated_tokens: int = 0
    seconds: float = 0.0
    """In steps, the sampler included."""
    preemptions: int = 0
    """Times that a sequence lost its pages to another and had to compute its tokens again."""
    cancelled: int = 0
    prefix_hits: int = 0
    """Times that a sequence began, or came back, with tokens that were cached already."""
    reused_tokens: int = 0
    """Tokens that were found in the cache and not computed."""
    state_snapshots: int = 0
    """Recurrent states that were kept for later requests."""
    most_pages: int = 0
    """Cache pages in use at a time."""
    pages: int = 0
    """Cache pages that there are."""
    graph_replays: int = 0
    """Steps that replayed a CUDA graph."""
    steps_ahead: int = 0
    """Steps that were started before the tokens of the one before had arrived."""
    dropped_tokens: int = 0
    """Tokens of such steps for requests that had ended with the step before."""

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    def cache(self) -> dict[str, int]:
        """Return how the cache fared."""
        names = (
            "preemptions",
            "prefix_hits",
            "reused_tokens",
            "state_snapshots",
            "most_pages",
            "pages",
        )
        return {name: getattr(self, name) for name in names}

    def cache_line(self) -> str:
        """Say how the cache fared, in one line."""
        return (
            f"at most {self.most_pages} of {self.pages} cache pages in use, {self.preemptions} preemptions, "
            f"{self.reused_tokens} tokens reused from {self.prefix_hits} known prefixes"
        )

    def as_dict(self) -> dict[str, float]:
        """Return all figures, for reports."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


@dataclass
class Engine:
    """One model, ready to run: the cached graph, its caches and the scheduler.

    With `overlap` the next step is prepared and started while the device is at work on the present
    one. What ends a request is then seen one step late, and the token that was too many is dropped:
    answers are the same either way. `history` (one entry a transform) and `facts` (fallbacks,
    skipped matches) are those of the pipeline.
    """

    gm: nn.Module
    cache: CachedSequenceInterface
    tokenizer: Tokenizer | None = None
    eos_token_ids: frozenset[int] = frozenset()
    vocab_size: int | None = None
    """Prompts hold token ids below it; None: unknown, unchecked."""
    rope: LengthDependentRope | None = None
    composite: Composite | None = None
    """The towers of a composite model."""
    reuse: bool = True
    """Whether a request takes over what earlier ones with the same beginning left in the cache."""
    overlap: bool = False
    """Has no effect with `rope`: which table comes next depends on what has ended."""
    history: list[Any] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)

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
        self._receiver = TokenReceiver(cache.latest)
        self._ahead: PendingStep | None = None
        self._detokenizers: dict[int, Detokenizer] = {}
        self._shifts = np.zeros(info.num_slots, dtype=np.int64)  # what the device has for each slot
        self._shifted: StepRows | None = None  # for which it has been told last
        self._given_graphs: dict[tuple[bool, bool, tuple[str, ...]], fx.GraphModule] = {}

    @property
    def codebooks(self) -> Codebooks:
        """What a token stands for."""
        return self.cache.info.codebooks

    @property
    def capacity(self) -> int:
        """Most tokens, prompt included, that one sequence can have."""
        return min(self.cache.info.max_seq_len, self.memory.capacity)

    @property
    def limits(self) -> dict[str, int]:
        """What the engine serves, by the names of the configuration."""
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
    ) -> list[Request]:
        """Queue a prompt; return its `params.n` outputs, which `step` completes.

        `inputs` are what transformers' processor makes of the prompt's images beside the tokens.
        Requests of a smaller `priority` go first, and take pages from others when there are not
        enough.
        Raises `UsageError` if the prompt is empty, too long, or has a token that the model does not
        have.
        """
        self._check_prompt(prompt, room_for=1)
        if params.stop and self.tokenizer is None:
            raise UsageError(
                "stop texts need a tokenizer and the checkpoint has none", hint="Use stop_token_ids"
            )
        given = self._prepare(list(prompt), inputs) if inputs else None
        keys = [stream_key(params, index) for index in range(params.n)]
        outputs = [Request(list(prompt), params, key, priority, given) for key in keys]
        for output in outputs:
            output.limit = min(len(prompt) + params.max_tokens, self.capacity)
            output.last_tokens = self._last_tokens(params)
            self.scheduler.add(output)
        return outputs

    def cancel(self, output: Request) -> bool:
        """Drop an output between two steps, what it has so far is kept; False: it was finished
        already.
        """
        if not self.scheduler.cancel(output):
            return False
        self.stats.cancelled += 1
        self._set_text(output)
        return True

    @torch.inference_mode()
    def run(self, on_step: Callable[[Step], None] | None = None) -> None:
        """Step until every output is finished; after an error nothing is left queued."""
        try:
            while self.scheduler.busy:
                step = self.step()
                if on_step is not None:
                    on_step(step)
        finally:
            self.scheduler.abort()
            self._ahead = None
            self._detokenizers.clear()

    def step(self) -> Step:
        """Finish one forward pass, and take in the next token of every sequence that it
        completes.
        """
        # `run` has entered it already: to ask is quicker than to enter it once more.
        if torch.is_inference_mode_enabled():
            return self._step()
        with torch.inference_mode():
            return self._step()

    def _step(self) -> Step:
        start = time.perf_counter()
        # A step launched ahead is dropped when all of its sequences have ended meanwhile.
        pending = self._ahead if self._ahead is not None and self._ahead.step.is_live() else None
        pending = pending or self._launch(self.scheduler.schedule())
        # Every token that this step reads has arrived: recorded before the next step is scheduled.
        self.scheduler.settle(pending.step)
        # The next step is enqueued before this one's tokens are waited for: the device goes on while
        # the host appends them. Its input ids are placeholders that the device fills in.
        self._ahead = self._launch_ahead() if self.overlap and self.rope is None else None
        self._take_in(pending)
        self._count(pending.step, time.perf_counter() - start)
        return pending.step

    @torch.inference_mode()
    def logits(self, input_ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Return the logits of every token of one prompt, [tokens, vocabulary] float32 on the CPU.

        The prompt is prefilled in chunks through the same graph that generates. Raises `UsageError`
        if it is too long.
        """
        tokens = np.asarray(torch.as_tensor(input_ids).flatten().tolist(), dtype=np.int64)
        self._check_prompt(tokens.tolist(), room_for=0)
        with self.cache.lent_pages([len(tokens)]) as pages:
            return torch.cat(list(self._prefill_logits(tokens, pages)))

    def _launch(self, step: Step) -> PendingStep:
        """Start a step; return without its tokens."""
        shifts = self.cache.caches.get(MROPE_DELTA)
        if shifts is not None:
            self._set_shifts(shifts, step)
        positions = step.position_ids(shifted=shifts is not None)
        self.cache.info.set_rows(
            step.rows.slots, step.lengths, rope_length=step.rope_length, position_ids=positions
        )
        tokens, logits = self._run_given(step) if step.has_given() else self._run(step)
        self.scheduler.launched(step)
        # After the launch: the event is recorded behind the kernels that write the tokens.
        arriving = self._receiver.receive(tokens, step.rows.slots, step.ends)
        return PendingStep(step, arriving, logits().clone() if step.rows.wants_logprobs else None)

    def _set_shifts(self, cache: torch.Tensor, step: Step) -> None:
        """Tell the device how far the positions of a step's sequences have moved, where it does not
        know it yet.
        """
        if step.rows is self._shifted:
            return
        wanted, slots = step.shifts(), step.rows.slots
        if (self._shifts[slots] != wanted).any():
            self._shifts[slots] = wanted
            cache[torch.from_numpy(slots).to(cache.device), 0] = torch.from_numpy(wanted).to(
                cache.device
            )
        self._shifted = step.rows

    def _launch_ahead(self) -> PendingStep | None:
        """Launch the next step before the tokens of the current one have arrived, if scheduling does
        not depend on them.
        """
        step = self.scheduler.schedule_ahead()
        return None if step is None else self._launch(step)

    def _run(self, step: Step) -> Chosen:
        """Run the graph; a decode step for which graphs were captured and none was replayed is a
        fact.
        """
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

    def _prepare(self, prompt: list[int], inputs: Mapping[str, Any]) -> PromptInputs:
        if self.composite is None:
            raise UsageError(
                "a prompt has more than text and the model takes text alone",
                hint="Leave the images out",
            )
        given = self.composite.prepare(prompt, inputs)
        if given.longest_block() > self.cache.info.max_num_tokens:
            raise UsageError(
                f"an image has {given.longest_block()} tokens, which have to come in one step",
                hint=f"Raise max_num_tokens ({self.cache.info.max_num_tokens})",
            )
        return given

    def _run_given(self, step: Step) -> Chosen:
        """Run a step in which prompts with images are read: rows of their tokens come from the
        towers.
        """
        parts = [chunk.sequence.given for chunk in step.chunks if chunk.reads_given()]
        rope = any(part.tables is not None for part in parts if part is not None)
        blocks = any(part.blocks is not None for part in parts if part is not None)
        assert self.composite is not None
        added = tuple(sorted({layer for part in parts if part is not None for layer in part.added}))
        if (key := (rope, blocks, added)) not in self._given_graphs:
            (_, graph), *_ = graph_modules(self.gm)
            embedding = self.composite.embedding
            self._given_graphs[key] = with_given_inputs(
                graph, embedding, rope=rope, blocks=blocks, added=added
            )
        info = self.cache.info
        info.inputs = {
            **info.inputs,
            **given_rows(step, info.inputs["input_ids"].shape[1], info.device),
        }
        return self.cache.next_tokens(self._given_graphs[key])

    @property
    def _replays(self) -> int:
        """CUDA graphs replayed so far, 0 for a graph without captures."""
        return int(getattr(self.gm, "replays", 0))

    def _prefill_logits(
        self, tokens: np.ndarray[Any, Any], pages: np.ndarray[Any, Any]
    ) -> list[torch.Tensor]:
        chunk, parts = min(_LOGITS_CHUNK, self.cache.info.max_num_tokens), []
        # The scheduler's sequences have those before
        slot = np.array([self.cache.info.num_slots - 1])
        table = self.rope.table(len(tokens)) if self.rope else 0
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            self.cache.info.set_batch(
                part,
                np.array([start]),
                np.array([len(part)]),
                pages,
                np.arange(len(part)),
                slots=slot,
                rope_length=table,
            )
            parts.append(self.cache.logits(self.gm).float().cpu())
        return parts

    def _check_prompt(self, prompt: Sequence[int], *, room_for: int) -> None:
        if not len(prompt):
            raise UsageError("a prompt has no tokens", hint="Give at least one token")
        # Looking up such a token would be an error that ends the process on a GPU.
        last = self.vocab_size - 1 if self.vocab_size else math.inf
        if bad := [token for token in prompt if not 0 <= token <= last]:
            raise UsageError(f"a prompt has token {bad[0]}", hint=f"Token ids go from 0 to {last}")
        if len(prompt) + room_for > self.capacity:
            raise UsageError(
                f"a prompt has {len(prompt)} tokens and a sequence can have {self.capacity} in all",
                hint="Shorten it, or raise max_seq_len (and the cache's max_tokens)",
            )

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
        """Wait for a step's tokens, append them, and finish the sequences that have ended."""
        step, tokens = pending.step, pending.chosen()
        took = self.scheduler.append(step, tokens)
        if pending.logits is not None:
            for row, sequence in took:
                if (most := sequence.params.logprobs) is not None:
                    sequence.logprobs.append(
                        logprobs(pending.logits[row], tokens[row], most, self.codebooks)
                    )
        for row, sequence in took if step.may_end(tokens) else ():
            self._end(sequence, tokens[row])
        self.stats.generated_tokens += len(took)
        self.stats.dropped_tokens += len(step.rows.complete) - len(took)

    def _end(self, sequence: Request, token: int) -> None:
        """Finish a sequence if `token`, its latest, is its last."""
        if token in sequence.last_tokens or (
            sequence.params.stop and self._stop_position(sequence) is not None
        ):
            self._finish(sequence, "stop")
        elif len(sequence.tokens) >= sequence.limit:
            self._finish(sequence, "length")

    def _finish(self, sequence: Request, reason: FinishReason) -> None:
        self.scheduler.finish(sequence, reason)
        self._set_text(sequence)

    def _last_tokens(self, params: SamplingParams) -> frozenset[int]:
        return frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else self.eos_token_ids
        )

    def _stop_position(self, sequence: Request) -> int | None:
        """Return where in the text the first stop text begins."""
        assert self.tokenizer is not None
        detokenizer = self._detokenizers.setdefault(id(sequence), Detokenizer(self.tokenizer))
        text = detokenizer.update(sequence.generated)
        found = [position for stop in sequence.params.stop if (position := text.find(stop)) >= 0]
        return min(found, default=None)

    def _set_text(self, sequence: Request) -> None:
        if self.tokenizer is None:
            return
        shown = sequence.generated
        if shown and shown[-1] in sequence.last_tokens:
            shown = shown[:-1]
        sequence.text = self.tokenizer.decode(shown)
        if sequence.params.stop:
            position = self._stop_position(sequence)
            text = self._detokenizers.pop(id(sequence)).text
            sequence.text = sequence.text if position is None else text[:position]
