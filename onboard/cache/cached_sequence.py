"""All that a cached graph is called with: a step's numbers, and the caches with the pages that they
are made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import fx, nn

from onboard.cache.batch import SequenceInfo
from onboard.cache.budget import CachePlan
from onboard.cache.next_token import ChoosesTokens, Chosen, LatestTokens, wanted_logits
from onboard.cache.pages import PageAllocator, PageGroup
from onboard.cache.resources import CacheResource, StateResource
from onboard.cache.step_buffer import IntArray, table_names

MROPE_DELTA = "mrope_delta_cache"
"""The cache, if there is one, of what the graph adds to the positions of each sequence."""


class CachedSequenceInterface:
    """The sequence metadata and the named caches of one model: everything that its cached graph is
    called with.
    """

    def __init__(self, info: SequenceInfo) -> None:
        self.info = info
        self.resources: dict[str, CacheResource] = {}
        """Cache name (a placeholder of the graph) -> what it stores."""
        self.caches: dict[str, torch.Tensor] = {}
        self.groups = [PageGroup(PageAllocator(0))]
        """The pages, by how far back those see who read them: each group has a table of its own."""
        self.num_pages = 0
        """Pages of a cache without a window, the spare page 0 included."""
        self.latest = LatestTokens(info.num_slots, info.device, info.codebooks)
        self._known: tuple[nn.Module, int, list[str]] | None = None

    def add_cache(self, name: str, resource: CacheResource) -> None:
        """Register a cache; its memory comes with `allocate`."""
        assert name not in self.resources, f"cache {name} is registered twice"
        self.resources[name] = resource
        if (groups := max(len(self._windows()), 1)) != self.info.num_groups:
            self.info.set_groups(groups)

    def narrow(self, max_batch_size: int, snapshots: int) -> None:
        """Lay everything out anew for fewer sequences, before any cache is allocated."""
        assert not self.caches
        info = self.info
        info.max_batch_size, info.snapshots = max_batch_size, snapshots
        info.set_groups(info.num_groups)
        self.latest = LatestTokens(info.num_slots, info.device, info.codebooks)

    def metadata_names(self, names: Sequence[str], resource: CacheResource) -> list[str]:
        """Return the inputs that an operator takes over a registered cache: where its pages lie is
        its group's.
        """
        if resource.by_sequence:
            return list(names)
        own = table_names(self._windows().index(self.info.limits.window(resource)))
        tables = dict(zip(table_names(0), own, strict=True))
        return [tables.get(name, name) for name in names]

    def allocate(self, num_pages: int) -> None:
        """(Re)allocate every cache; contents are lost.

        Paged ones get `num_pages` pages, the spare page 0 among them, or what a window can use of
        them; states as many slots as a batch can use.
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
        """Return what the groups of pages see, in the order in which they are registered."""
        return CachePlan(self.info.limits, tuple(self.resources.values())).windows

    @property
    def allocator(self) -> PageAllocator:
        """The pages of the first group, the only one of most models."""
        return self.groups[0].allocator

    def forget(self) -> None:
        """Put ones in place of all that the caches hold, which nobody may need any more."""
        for cache in self.caches.values():
            cache.fill_(1)

    @property
    def has_states(self) -> bool:
        """Whether some caches hold recurrent states."""
        return bool(self._states)

    @property
    def _states(self) -> list[str]:
        """Return the caches of recurrent states."""
        return [
            name
            for name, each in self.resources.items()
            if isinstance(each, StateResource) and each.carries
        ]

    def copy_state(self, source: int, target: int) -> None:
        """Copy the recurrent states of one slot to another."""
        states = [self.caches[name] for name in self._states]
        torch._foreach_copy_(
            [state[target] for state in states], [state[source] for state in states]
        )

    def can_lend(self, lengths: Sequence[int]) -> bool:
        """Whether `lent_pages` has the pages for sequences of these lengths."""
        return all(
            sum(self._needed(each, lengths)) <= each.allocator.num_free for each in self.groups
        )

    @contextmanager
    def lent_pages(self, lengths: Sequence[int]) -> Iterator[IntArray]:
        """Lend pages for sequences of these lengths: [groups, sequences, most pages of one], filled
        up with page 0.

        Pages of a window are lent as a ring: what comes takes the place of what no later query
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
        """Return the pages that sequences of these lengths need at a time, when a step has all the
        tokens it can.
        """
        size, window = self.info.page_size, group.window
        most = max(lengths) if window is None else window + self.info.max_num_tokens + size
        return [-(-min(length, most) // size) for length in lengths]

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all caches."""
        return sum(resource.bytes_per_page for resource in self.resources.values())

    @property
    def args(self) -> Mapping[str, torch.Tensor]:
        """Every input that a cached graph may name."""
        return {**self.info.args, **self.caches}

    def call(self, gm: nn.Module) -> torch.Tensor:
        """Run `gm` on the present step with exactly the inputs that it names; return logits [1,
        rows, vocabulary].
        """
        args = self.args
        output = gm(**{name: args[name] for name in self._names(gm)})
        logits = getattr(output, "logits", output)
        assert isinstance(logits, torch.Tensor)
        return logits

    def logits(self, gm: nn.Module) -> torch.Tensor:
        """Run `gm` and return the wanted logits [wanted rows, vocabulary], padding rows
        included.
        """
        return wanted_logits(self.call(gm), self.info.args, self._names(gm))

    def next_tokens(self, gm: nn.Module) -> Chosen:
        """Run `gm` and choose a token a sequence, padding included; what is returned lasts until
        the next call.
        """
        info, inputs = self.info, self.info.inputs
        chosen = gm.next_tokens(inputs, self.caches) if isinstance(gm, ChoosesTokens) else None
        if chosen is not None:
            info.buffer.fetched()
        else:
            args = {**self.args, **info.choice}
            chosen = self.latest.run(
                gm, args, self._names(gm), drawn=info.rows.drawn, filtered=info.rows.filtered
            )
        return chosen[0], lambda: wanted_logits(chosen[1], inputs, self._names(gm))

    def _names(self, gm: nn.Module) -> list[str]:
        """Return the names of the inputs of `gm`, read off its graph only after the graph has
        changed.
        """
        size = len(gm.graph.nodes) if hasattr(gm, "graph") else 0  # type: ignore[union-attr, arg-type]
        if self._known is None or self._known[:2] != (gm, size):
            self._known = gm, size, input_names(gm)
        return self._known[2]


def input_names(gm: nn.Module) -> list[str]:
    """Return the names of a graph module's placeholders, also through a wrapper that exposes
    `graph`.

    A model without a graph says them itself (`input_names`).
    """
    if not hasattr(gm, "graph"):
        names: list[str] = gm.input_names  # type: ignore[assignment]
        return names
    graph = gm.graph
    assert isinstance(graph, fx.Graph)
    return [str(node.target) for node in graph.find_nodes(op="placeholder")]
