"""Decode steps as CUDA graphs: captured once for some batch sizes, then replayed with new numbers
at the same addresses.

A captured step runs from the copy of the step buffer (`cache/step_buffer.py`) to the chosen tokens
(`cache/next_token.py`), and nothing in it waits for the host. Replays and eager steps are enqueued
on one stream, so each begins after the one before has ended; the host returns from a replay at once
and learns of its end by the event that `TokenReceiver` records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from onboard.cache.batch import SequenceInfo
from onboard.cache.cached_sequence import CachedSequenceInterface, input_names
from onboard.cache.examples import set_decode_example
from onboard.cache.next_token import ChoosesTokens, wanted_logits
from onboard.cache.token_masks import MaskBuffer, TokenMasks, masked
from onboard.graph.compile.captured_prompts import CapturedPrompts
from onboard.graph.compile.captured_step import CapturedStep, borrowed, captured_graph
from onboard.graph.compile.direct_calls import directly


@dataclass(frozen=True)
class _Decode(CapturedStep):
    """A captured decode step."""

    again: _Again | None = None
    """None where tokens are not chosen a second time by a graph."""


@dataclass(frozen=True)
class _Again:
    """The second choice behind a captured step, from its logits and with masks."""

    graph: torch.cuda.CUDAGraph
    tokens: torch.Tensor
    """[sequences] each replay overwrites them."""


class CapturedDecode(ChoosesTokens):
    """A cached graph that replays captured decode steps and runs all other steps eagerly.

    Called with the same named inputs as the graph module, and returns the same. A step is replayed
    if `SequenceInfo` describes it and it is a decode batch of a captured size (`decode_sizes` pads
    batches to these); other inputs run eagerly.
    """

    def __init__(self, gm: nn.Module, plain: nn.Module | None = None) -> None:
        """`plain` is the graph without adapters, if it has any: steps in which no sequence has one
        replay that.
        """
        super().__init__()
        self.gm = gm
        self._plain = plain
        self.replays = 0
        """Number of calls that replayed a CUDA graph."""
        self.eager_calls = 0
        """Number of calls that ran eagerly: prefill, mixed batches, other decode batch sizes."""
        self._captured: dict[tuple[int, bool], _Decode] = {}
        """By number of sequences, and whether some have adapters."""
        self._info: SequenceInfo | None = None
        self._masks: MaskBuffer | None = None
        self.prompts: CapturedPrompts | None = None
        """Captured steps that read prompts or drafts."""

    @property
    def graph(self) -> torch.fx.Graph:
        """The graph module's FX graph."""
        return self.gm.graph  # type: ignore[return-value]

    @property
    def sizes(self) -> list[int]:
        """The captured batch sizes, ascending."""
        return sorted({size for size, _ in self._captured})

    @torch.inference_mode()
    def capture(self, cache: CachedSequenceInterface, sizes: Sequence[int]) -> None:
        """Capture a decode step of each size, the largest first, in one memory pool.

        Steps share the pool, since one runs at a time: the memory of one is that of all, its results
        among it.
        """
        pool = torch.cuda.graph_pool_handle()
        longest = min(cache.info.max_seq_len, (cache.num_pages - 1) * cache.info.page_size)
        self._info = cache.info
        graphs = {True: directly(self.gm)}
        if self._plain is not None:
            graphs[False] = directly(self._plain)
        for size, adapted in product(sorted(sizes, reverse=True), graphs):
            gm = graphs[adapted]
            names = input_names(gm)
            # With the longest context: what a launcher decides on the host from lengths is baked
            # into the graph, and must hold for every later step.
            set_decode_example(cache.info, size, longest)
            args = {**cache.args, **cache.info.choice}
            graph, (tokens, output) = captured_graph(
                partial(self._step, gm, cache, args, names, size), _described(size), pool
            )
            again = self._captured_again(cache, args, wanted_logits(output, args, names), pool)
            tokens, output = pytree.tree_map_only(torch.Tensor, borrowed, (tokens, output))
            self._captured[size, adapted] = _Decode(
                graph, cache.info.inputs, cache.caches, tokens, output, again
            )

    def _captured_again(
        self,
        cache: CachedSequenceInterface,
        args: Mapping[str, torch.Tensor],
        logits: torch.Tensor,
        pool: Any,
    ) -> _Again | None:
        """Capture the second choice from a captured step's logits: a graph of its own, so that
        steps without it stay as they are.
        """
        if cache.ranks.told_tokens or cache.info.codebooks.count > 1:
            return None
        size, vocabulary = logits.shape
        if self._masks is None:  # the largest size comes first
            self._masks = MaskBuffer(size, vocabulary, logits.device)
        masks = self._masks

        def choose() -> torch.Tensor:
            return cache.latest.choose(
                masked(logits, masks.fetch(size)), args, drawn=True, filtered=True
            )

        return _Again(*captured_graph(choose, _described(size), pool))

    def _step(
        self,
        gm: nn.Module,
        cache: CachedSequenceInterface,
        args: Mapping[str, torch.Tensor],
        names: Sequence[str],
        size: int,
    ) -> tuple[torch.Tensor, Any]:
        # In this order: the numbers of the step have to be on the device before its first kernel
        # reads them, and placeholder tokens are replaced before the embedding looks them up.
        cache.info.buffer.fetch(size)
        return cache.latest.run(gm, args, names)

    def forward(self, **inputs: torch.Tensor) -> Any:
        """Run one step; inputs as the graph module's placeholders."""
        captured = self._found(inputs)
        places = {} if captured is None else {**captured.inputs, **captured.caches}
        if captured is None or any(places.get(name) is not each for name, each in inputs.items()):
            self.eager_calls += 1
            return self.gm(**inputs)
        self._replay(captured)
        # The next replay overwrites the output: return a copy.
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, captured.output)

    def next_tokens(
        self, inputs: Mapping[str, torch.Tensor], caches: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Any] | None:
        """Replay a captured step; the next replay overwrites what is returned.

        The host has written the step's numbers to the step buffer before; the replay copies them.
        """
        captured = self._found(inputs)
        if captured is None or captured.inputs is not inputs:
            return self._read_prompts(inputs, caches)
        captured.check(caches)
        self._replay(captured)
        return captured.tokens, captured.output

    def choose_again(
        self, inputs: Mapping[str, torch.Tensor], masks: TokenMasks
    ) -> torch.Tensor | None:
        """Replay the second choice behind the step that was replayed last."""
        captured = self._found(inputs)
        if captured is None or captured.inputs is not inputs or captured.again is None:
            return None
        assert self._masks is not None
        self._masks.write(masks)
        captured.again.graph.replay()
        return captured.again.tokens

    def _found(self, inputs: Mapping[str, torch.Tensor]) -> _Decode | None:
        """Return what was captured for a step of this size, without adapters if it needs none."""
        adapted = self._plain is None or self._info is None or self._info.is_adapted
        return self._captured.get((inputs["input_ids"].shape[1], adapted))

    def _read_prompts(
        self, inputs: Mapping[str, torch.Tensor], caches: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Any] | None:
        """Replay a captured step that reads prompts or drafts."""
        captured = None if self.prompts is None else self.prompts.replay(inputs, caches)
        if captured is None:
            return None
        self.replays += 1
        return captured.tokens, captured.output

    def _replay(self, captured: _Decode) -> None:
        captured.graph.replay()
        self.replays += 1


def _described(size: int) -> str:
    return f"a decode step of {size} sequences"
