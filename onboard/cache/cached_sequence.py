"""All inputs of a cached graph: a step's tokens and metadata, and the caches with their pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import fx, nn

from onboard.cache.batch import SequenceInfo
from onboard.cache.budget import CachePlan
from onboard.cache.next_token import ChoosesTokens, Chosen, LatestTokens, wanted_logits
from onboard.cache.pages import PageAllocator, PageGroup
from onboard.cache.resources import CacheResource, StateResource
from onboard.cache.step_buffer import IntArray, table_names
from onboard.cache.token_masks import TokenMasks, masked
from onboard.parallel.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from onboard.cache.orders import Orders

MROPE_DELTA = "mrope_delta_cache"
"""Name of the cache that holds each sequence's position offset, if the graph adds it."""


class CachedSequenceInterface:
    """The step's inputs and the named caches of one model: everything that its cached graph
    takes.
    """

    def __init__(
        self, info: SequenceInfo, ranks: Ranks = ALONE, whole: Sequence[CacheResource] = ()
    ) -> None:
        self.info = info
        self.whole = tuple(whole)
        """The caches of the whole model, where this rank has those of some layers alone: pages are
        numbered, and states are kept, for all."""
        self.ranks = ranks
        self.orders: Orders | None = None
        """Where other ranks do what this one does."""
        self.resources: dict[str, CacheResource] = {}
        """Cache name (an input of the graph) -> its shape and dtype."""
        self.caches: dict[str, torch.Tensor] = {}
        self.groups = [PageGroup(PageAllocator(0))]
        """Groups of pages, one for each attention window: each group has its own block table."""
        self.num_pages = 0
        """Number of pages of a cache without a window, the spare page 0 included."""
        self.latest = LatestTokens(info.num_slots, info.device, info.codebooks, ranks)
        self._known: WeakKeyDictionary[nn.Module, tuple[int, list[str]]] = WeakKeyDictionary()
        if self.whole:
            self._fit_groups()

    def add_cache(self, name: str, resource: CacheResource) -> None:
        """Register a cache; `allocate` gives it memory."""
        assert name not in self.resources, f"cache {name} is registered twice"
        self.resources[name] = resource
        self._fit_groups()

    def _fit_groups(self) -> None:
        if (groups := max(len(self._windows()), 1)) != self.info.num_groups:
            self.info.set_groups(groups)

    def narrow(self, max_batch_size: int, snapshots: int) -> None:
        """Lower the batch size and lay everything out anew, before any cache is allocated."""
        assert not self.caches
        info = self.info
        info.max_batch_size, info.snapshots = max_batch_size, snapshots
        info.set_groups(info.num_groups)
        self.latest = LatestTokens(info.num_slots, info.device, info.codebooks, self.ranks)

    def metadata_names(self, names: Sequence[str], resource: CacheResource) -> list[str]:
        """Return the metadata inputs of an op over a registered cache: `names`, with the block
        table and slot mapping of the cache's group.
        """
        if resource.by_sequence:
            return list(names)
        own = table_names(self._windows().index(self.info.limits.window(resource)))
        tables = dict(zip(table_names(0), own, strict=True))
        return [tables.get(name, name) for name in names]

    def allocate(self, num_pages: int) -> None:
        """Allocate every cache, again if there are some; contents are lost.

        A paged cache gets `num_pages` pages, the spare page 0 included, or fewer if its window
        cannot use them all; recurrent states get `Limits.num_slots` slots.
        """
        self.caches.clear()  # free the old ones first
        plan = CachePlan(self.info.limits, tuple(self.resources.values()))
        self.caches = {
            name: resource.allocate(plan.units(resource, num_pages), self.info.device)
            for name, resource in self.resources.items()
        }
        windows = self._windows() or [None]
        sizes = [
            num_pages if each is None else min(num_pages, plan.limits.window_pages(each))
            for each in windows
        ]
        self.groups = [
            PageGroup(PageAllocator(size), each) for size, each in zip(sizes, windows, strict=True)
        ]
        self.info.pool_sizes = sizes
        self.num_pages = num_pages

    def _windows(self) -> list[int | None]:
        """Return the window of each group of pages, in the order of registration."""
        return CachePlan(self.info.limits, (*self.whole, *self.resources.values())).windows

    @property
    def allocator(self) -> PageAllocator:
        """The page allocator of the first group; most models have one group."""
        return self.groups[0].allocator

    def forget(self) -> None:
        """Overwrite all caches with ones; no sequence may be running."""
        if self.orders is not None:
            self.orders.forget()
        for cache in self.caches.values():
            cache.fill_(1)

    @property
    def has_states(self) -> bool:
        """Whether some caches hold recurrent states, here or on another rank."""
        return bool(self._states) or any(map(_carries, self.whole))

    @property
    def _states(self) -> list[str]:
        """Return the names of the caches of recurrent states."""
        return [name for name, each in self.resources.items() if _carries(each)]

    def copy_state(self, source: int, target: int) -> None:
        """Copy the recurrent states of one slot to another, on the device.

        The copy is enqueued behind the steps launched so far and before the next one, so it reads
        the state as those steps leave it.
        """
        if self.orders is not None:
            self.orders.copy_state(source, target)
        if not (states := [self.caches[name] for name in self._states]):
            return
        torch._foreach_copy_(
            [state[target] for state in states], [state[source] for state in states]
        )

    @property
    def has_shifts(self) -> bool:
        """Whether the graph adds position offsets itself."""
        return MROPE_DELTA in self.caches

    def shift(self, slots: IntArray, values: IntArray) -> None:
        """Set the position offsets of some slots, on the device."""
        if self.orders is not None:
            self.orders.shift(slots, values)
        cache = self.caches[MROPE_DELTA]
        places, offsets = (torch.tensor(each, device=cache.device) for each in (slots, values))
        cache[places, 0] = offsets

    def can_lend(self, lengths: Sequence[int]) -> bool:
        """Whether enough pages are free for `lent_pages` with these lengths."""
        return all(
            sum(self._needed(each, lengths)) <= each.allocator.num_free for each in self.groups
        )

    @contextmanager
    def lent_pages(self, lengths: Sequence[int]) -> Iterator[IntArray]:
        """Lend pages for sequences of these lengths while the block runs: [groups, sequences,
        pages], shorter sequences filled up with page 0.

        A group with a window lends a ring of pages: new tokens overwrite those that no later query
        sees.
        """
        counts = [-(-length // self.info.page_size) for length in lengths]
        table = np.zeros((len(self.groups), len(counts), max(counts)), dtype=np.int32)
        with ExitStack() as stack:
            for rows, group in zip(table, self.groups, strict=True):
                for row, count, needed in zip(
                    rows, counts, self._needed(group, lengths), strict=True
                ):
                    pages = group.allocator.take(needed)
                    stack.callback(group.allocator.give_back, pages)
                    row[:count] = np.resize(pages, count)
            yield table

    def _needed(self, group: PageGroup, lengths: Sequence[int]) -> list[int]:
        """Return how many pages each sequence needs at once, if steps are as large as allowed."""
        size, window = self.info.page_size, group.window
        most = max(lengths) if window is None else window + self.info.max_num_tokens + size
        return [-(-min(length, most) // size) for length in lengths]

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all caches."""
        return sum(resource.bytes_per_page for resource in self.resources.values())

    @property
    def args(self) -> Mapping[str, torch.Tensor]:
        """Every input that a cached graph may take; starts the copy of the step's numbers."""
        return {**self.info.args, **self.caches}

    def call(self, gm: nn.Module) -> torch.Tensor:
        """Run `gm` on the current step with the inputs that it names; return logits [1, rows,
        vocabulary].
        """
        if self.orders is not None:
            self.orders.compute()
        args = self.args
        output = gm(**{name: args[name] for name in self._names(gm)})
        logits = getattr(output, "logits", output)
        assert isinstance(logits, torch.Tensor)
        return logits

    def logits(self, gm: nn.Module) -> torch.Tensor:
        """Run `gm`; return the logits of the tokens in `logits_gather_indices`, [rows,
        vocabulary], padding included.
        """
        return wanted_logits(self.call(gm), self.info.args, self._names(gm))

    def next_tokens(self, gm: nn.Module) -> Chosen:
        """Run `gm` and choose one token for each sequence, or row of logits of a step with drafts,
        padding included; both results are valid until the next call.
        """
        if self.orders is not None:
            self.orders.choose()
        info, inputs = self.info, self.info.inputs
        chosen = gm.next_tokens(inputs, self.caches) if isinstance(gm, ChoosesTokens) else None
        if chosen is not None:
            # A captured step was replayed, whose first kernels copy the step buffer: no upload.
            info.buffer.fetched()
        else:
            # `self.args` starts the upload; the graph's kernels are enqueued behind it.
            args = {**self.args, **info.choice}
            chosen = self.latest.run(
                gm, args, self._names(gm), drawn=info.rows.drawn, filtered=info.rows.filtered
            )
        return chosen[0], lambda: wanted_logits(chosen[1], inputs, self._names(gm))

    def choose_again(
        self,
        logits: torch.Tensor,
        masks: TokenMasks,
        gm: nn.Module,
        changed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Choose the tokens of the step that `gm` has run last again, from those that `masks` allow;
        return them, [rows].

        `logits` [rows, vocabulary] are the step's own; `changed` are others to choose from.
        """
        if self.orders is not None and self.ranks.told_tokens:
            self.orders.choose_again()
        if changed is None and isinstance(gm, ChoosesTokens):
            tokens = gm.choose_again(self.info.inputs, masks)
            if tokens is not None:
                return tokens
        wanted = logits if changed is None else changed
        return self._choose_again(masked(wanted, masks.on(wanted.device)))

    def hear_choice(self) -> None:
        """Take the tokens that the first rank has chosen again for the step launched last."""
        rows = len(self.info.inputs["state_slots"])
        self._choose_again(torch.zeros((rows, 0), device=self.info.device))

    def _choose_again(self, logits: torch.Tensor) -> torch.Tensor:
        info = self.info
        return self.latest.choose_for_all(
            logits,
            {**info.inputs, **info.choice},
            drawn=info.rows.drawn,
            filtered=info.rows.filtered,
        )

    def _names(self, gm: nn.Module) -> list[str]:
        """Return the names of the inputs of `gm`; kept until its graph changes."""
        size = len(gm.graph.nodes) if hasattr(gm, "graph") else 0  # type: ignore[union-attr, arg-type]
        known = self._known.get(gm)
        if known is None or known[0] != size:
            known = self._known[gm] = size, input_names(gm)
        return known[1]


def _carries(resource: CacheResource) -> bool:
    return isinstance(resource, StateResource) and resource.carries


def input_names(gm: nn.Module) -> list[str]:
    """Return the names of a graph module's inputs, also of a wrapper that exposes `graph`.

    A model without a graph lists them itself (`input_names`).
    """
    if not hasattr(gm, "graph"):
        names: list[str] = gm.input_names  # type: ignore[assignment]
        return names
    graph = gm.graph
    assert isinstance(graph, fx.Graph)
    return [str(node.target) for node in graph.find_nodes(op="placeholder")]
