"""What is computed of one prompt for itself, with nothing generated: logits, log-probabilities,
hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import nn

from onboard.cache.cached_sequence import CachedSequenceInterface
from onboard.cache.step_buffer import IntArray
from onboard.errors import UsageError
from onboard.graph.cache_init.hidden_output import with_hidden_output
from onboard.graph.fx import graph_modules
from onboard.runtime.length_dependent_rope import LengthDependentRope
from onboard.runtime.logprobs import logprobs

_CHUNK = 256
"""Tokens in one chunk of a prompt: their logits are [tokens, vocabulary] and large."""


class PromptPass:
    """Prefills prompts in chunks, through the graph that generates, in pages lent for that.

    Prompts are checked by the caller: token ids, length, and that there are enough pages.
    """

    def __init__(
        self, gm: nn.Module, cache: CachedSequenceInterface, rope: LengthDependentRope | None
    ) -> None:
        self._gm, self._cache, self._rope = gm, cache, rope

    def logits(self, prompt: Sequence[int], adapter: int = 0) -> torch.Tensor:
        """Return the logits of every token, [tokens, vocabulary] float32 on the CPU."""
        return torch.cat([part.float().cpu() for part in self._rows(self._gm, prompt, adapter)])

    def last_logits(
        self, prompts: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the logits of the last `counts[i]` tokens of each prompt, [count, vocabulary]
        float32 on the CPU; neighbours that fit into one step run in it.
        """
        found: list[torch.Tensor] = []
        while len(found) < len(prompts):
            start = len(found)
            end = start + self._fitting(prompts[start:], counts[start:])
            if end - start > 1:
                found += self._side_by_side(prompts[start:end], counts[start:end])
            else:
                found.append(self.logits(prompts[start])[-counts[start] :])
        return found

    def _fitting(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> int:
        """Return how many prompts, from the first one on, fit into a step; states, and rotary tables
        of a length, are one prompt's.
        """
        info = self._cache.info
        if self._rope is not None or self._cache.has_states:
            return 1
        for number in range(1, min(len(prompts), info.max_batch_size) + 1):
            lengths = [len(prompt) for prompt in prompts[:number]]
            fits = sum(lengths) <= info.max_num_tokens and sum(counts[:number]) <= _CHUNK
            if not (fits and self._cache.can_lend(lengths)):
                return max(number - 1, 1)
        return min(len(prompts), info.max_batch_size)

    def _side_by_side(
        self, prompts: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> list[torch.Tensor]:
        info, lengths = self._cache.info, np.array([len(prompt) for prompt in prompts])
        ends = lengths.cumsum()
        wanted = [np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
        with self._cache.lent_pages(lengths.tolist()) as pages:
            info.set_batch(
                np.concatenate([np.asarray(prompt, dtype=np.int64) for prompt in prompts]),
                np.zeros_like(lengths),
                lengths,
                pages,
                np.concatenate(wanted),
                slots=np.full(len(prompts), info.num_slots - 1),
            )
            rows = self._cache.logits(self._gm)[: sum(counts)].float().cpu()
        return list(torch.split(rows, list(counts)))

    def logprobs(
        self, prompt: Sequence[int], count: int, adapter: int = 0
    ) -> list[dict[int, float] | None]:
        """Return for each token but the first its log-probability, and those of the `count` most
        likely ones.
        """
        found: list[dict[int, float] | None] = [None]
        for rows in self._rows(self._gm, prompt, adapter):
            following = prompt[len(found) : len(found) + len(rows)]
            found += logprobs(rows[: len(following)], following, count, self._cache.info.codebooks)
        return found

    def hidden_states(self, prompt: Sequence[int], adapter: int = 0) -> torch.Tensor:
        """Return the last hidden state of every token, [tokens, hidden] float32 on the CPU.

        Raises `UsageError` if the graph does not show it, or other ranks would have to know of it.
        """
        if self._cache.orders is not None:
            raise UsageError("embeddings are computed on one device", hint="Set world_size to 1")
        rows = self._rows(self._hidden, prompt, adapter)
        return torch.cat([part.float().cpu() for part in rows])

    @cached_property
    def _hidden(self) -> nn.Module:
        found = list(graph_modules(self._gm))
        if not found:
            raise UsageError("a model without a graph gives no embeddings", hint="Use mode graph")
        return with_hidden_output(found[0][1])

    def _rows(self, gm: nn.Module, prompt: Sequence[int], adapter: int) -> Iterator[torch.Tensor]:
        """Yield what a graph gives for chunks of a prompt, [tokens, ...]."""
        tokens = np.asarray(prompt, dtype=np.int64)
        with self._cache.lent_pages([len(tokens)]) as pages:
            yield from self._chunks(gm, tokens, pages, adapter)

    def _chunks(
        self, gm: nn.Module, tokens: IntArray, pages: IntArray, adapter: int
    ) -> Iterator[torch.Tensor]:
        info = self._cache.info
        size = min(_CHUNK, info.max_num_tokens)
        # The last slot is reserved for this: the scheduler's sequences have those before it
        slot = np.array([info.num_slots - 1])
        table = self._rope.table(len(tokens)) if self._rope else 0
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            info.set_batch(
                part,
                np.array([start]),
                np.array([len(part)]),
                pages,
                np.arange(len(part)),
                slots=slot,
                rope_length=table,
                adapter=adapter,
            )
            yield self._cache.logits(gm)[: len(part)]
