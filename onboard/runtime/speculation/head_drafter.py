"""Drafts from the checkpoint's own heads for multi-token prediction (DeepSeek-AI 2024,
arXiv:2412.19437, section 2.2): they go on from the hidden states of the model itself.

Heads read and write the pages of the requests that they draft for. The row of token i has the
model's hidden state of token i, and the embedding of token i + 1; its keys lie where those of token
i do. One head drafts on from its own hidden states; several draft one token each, in turn. What a
head has kept decides no token: it may be of other drafts, or of another text that shares pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from weakref import WeakKeyDictionary

import numpy as np
import torch

from onboard.cache.cached_sequence import CachedSequenceInterface
from onboard.cache.step_buffer import StepSizes, table_names
from onboard.graph.draft_heads.add_heads import HeadGraph, draft_length
from onboard.runtime.scheduling.request import Request


@dataclass
class _Known:
    """What the heads have read of a request since it was last admitted."""

    admission: int
    rows: list[int]
    """Of each head: so many of the first rows are of the request's tokens, and not of drafts."""


@dataclass
class _Chain:
    """The drafts of a request, as they grow."""

    request: Request
    known: _Known
    most: int
    drafts: list[int] = field(default_factory=list)
    """Placeholder tokens among them stand for tokens that only the device knows."""

    def token(self, index: int) -> int:
        """Return a token of the request, or a draft behind them."""
        count = len(self.request.tokens)
        return self.request.tokens[index] if index < count else self.drafts[index - count]

    def replace(self, tokens: Sequence[int]) -> None:
        """Put tokens in the place of the last placeholder tokens, up to one that is below 0: its logits
        were no numbers.
        """
        del self.drafts[len(self.drafts) - len(tokens) :]
        self.drafts += takewhile(lambda token: token >= 0, tokens)


@dataclass
class _Rows:
    """Rows of a chain that a head is to compute: from `start` up to `stop`."""

    chain: _Chain
    start: int
    stop: int


class HeadDrafter:
    """Lets the heads in `heads`, the one for the nearest token first, continue requests whose pages
    are in `cache`.

    A chain ends where the pages that a request has already end.
    """

    def __init__(
        self, heads: Sequence[HeadGraph], cache: CachedSequenceInterface, num_tokens: int
    ) -> None:
        self.heads, self._cache = list(heads), cache
        self.most = draft_length(num_tokens, len(heads))
        """Tokens of a draft."""
        self._chosen: list[tuple[Sequence[_Chain], torch.Tensor]] = []
        """Drafts that the host has not received: chains, and a token [chains] for each."""
        self._known: WeakKeyDictionary[Request, _Known] = WeakKeyDictionary()
        own = cache.metadata_names(["block_table"], cache.resources[heads[0].reads])
        groups = range(cache.info.num_groups)
        self._group = next(group for group in groups if table_names(group)[0] == own[0])

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return the heads' continuation of each request; [] for prompts with images."""
        chains = [self._begun(request) for request in requests]
        for step in range(self.most):
            if going := [each for each in chains if len(each.drafts) == step < each.most]:
                self._extend(going, step)
        self._receive()
        return [chain.drafts for chain in chains]

    def _begun(self, request: Request) -> _Chain:
        known = self._known.get(request)
        if known is None or known.admission != request.num_preemptions:
            known = _Known(request.num_preemptions, [0] * len(self.heads))
            self._known[request] = known
        wanted = min(self.most, request.limit - len(request.tokens) - 1)
        if request.image_inputs is not None or len(request.tokens) < 2:
            wanted = 0
        if len(self.heads) == 1:  # its later rows lie behind the request's tokens
            wanted = min(wanted, request.room - len(request.tokens) + 2)
        return _Chain(request, known, wanted)

    def _extend(self, chains: Sequence[_Chain], step: int) -> None:
        """Draft one token more for each chain."""
        number = min(step, len(self.heads) - 1)
        head, further = self.heads[number], step - number
        if further:
            self._hand_on(head, chains, further)
        rows = [self._wanted(chain, number, further) for chain in chains]
        self._shorten(head, rows, number)
        # The next step of the same head overwrites what this one has chosen
        self._chosen.append((chains, self._run(head, rows, number)[: len(chains)].clone()))
        for chain in chains:
            chain.known.rows[number] = len(chain.request.tokens) - 1 - number
            chain.drafts.append(-chain.request.slot)
        if len(self.heads) > 1:  # the next head reads more of the drafts than the latest one
            self._receive()

    def _receive(self) -> None:
        """Wait for the drafts, and put them where their placeholder tokens are."""
        steps, self._chosen = self._chosen, []
        if not steps:
            return
        tokens = iter(torch.cat([chosen for _, chosen in steps]).tolist())
        new: dict[int, list[int]] = {}
        for chain in (chain for chains, _ in steps for chain in chains):
            new.setdefault(id(chain), []).append(next(tokens))
        for chain in steps[0][0]:  # those of the later steps are among them
            chain.replace(new[id(chain)])

    def _wanted(self, chain: _Chain, number: int, further: int) -> _Rows:
        """Return the rows that a head has not computed for certain, up to the one that drafts."""
        end = len(chain.request.tokens) - 1 + further
        return _Rows(chain, end - 1 if further else chain.known.rows[number], end)

    def _shorten(self, head: HeadGraph, rows: Sequence[_Rows], number: int) -> None:
        """Compute rows until what is left of all fits into one step."""
        budget = self._cache.info.max_num_tokens
        while sum(each.stop - each.start for each in rows) > budget:
            now, room = [], budget
            for each in rows:
                if count := min(each.stop - 1 - each.start, room):
                    now.append(_Rows(each.chain, each.start, each.start + count))
                    each.start, room = each.start + count, room - count
            self._run(head, now, number)

    def _run(self, head: HeadGraph, rows: Sequence[_Rows], number: int) -> torch.Tensor:
        """Compute rows; return the token chosen from the last one of each, padding included."""
        info = self._cache.info
        slots = np.array([each.chain.request.slot for each in rows])
        starts = np.array([each.start for each in rows])
        stops = np.array([each.stop for each in rows])
        places = np.concatenate([np.arange(each.start, each.stop) for each in rows])
        tokens = [
            each.chain.token(place + 1 + number)
            for each in rows
            for place in range(each.start, each.stop)
        ]
        info.set_batch(
            np.array(tokens),
            starts,
            stops - starts,
            info.rows.tables[:, slots, : info.rows.widths[slots].max()],
            slots=slots,
            position_ids=places + 1 + number,
            size=_captured_size(head, len(tokens), len(rows)),
            after=stops + 1 + number,
        )
        return self._cache.next_tokens(head.gm)[0]

    def _hand_on(self, head: HeadGraph, chains: Sequence[_Chain], further: int) -> None:
        """Let the next row begin with the hidden state that came out of the one before it."""
        slots = np.array([chain.request.slot for chain in chains])
        last = np.array([len(chain.request.tokens) - 2 + further for chain in chains])
        rows, info = np.stack([last - 1, last]), self._cache.info
        pages = info.rows.tables[self._group, slots, rows // info.page_size].astype(np.int64)
        places = torch.from_numpy(np.stack([pages, rows % info.page_size]))
        moved = places.to(info.device, non_blocking=True)  # else the host waits for the step before
        (source, target), (kept_at, read_at) = moved  # of pages, and of offsets in them
        kept, read = self._cache.caches[head.keeps], self._cache.caches[head.reads]
        read[target, 0, read_at] = kept[source, 0, kept_at]


def _captured_size(head: HeadGraph, tokens: int, sequences: int) -> StepSizes | None:
    """Return the size of the captured step that serves one of several tokens of a request, if any
    does.
    """
    if head.captured is None or tokens == sequences:
        return None
    return head.captured.serving(StepSizes(tokens, sequences, sequences), whole=False)
