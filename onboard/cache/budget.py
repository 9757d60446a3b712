"""What a run takes of a device's memory: one plan, that a run allocates by and `onboard plan`
shows.

Weights, tables and caches are exact: they are counted over the tensors that a run has. Activations
are the most that the graph's intermediate tensors take at a time; what the driver and libraries
hold is estimated (`CUDA_RESERVE`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from onboard.cache.resources import CacheResource, KVPagedResource

CUDA_RESERVE = 768 * 2**20
"""Bytes of a GPU that torch's allocator never sees: context, kernels, library workspaces; about
this on an H100.
"""
STARTING_TOKENS = 512
"""Tokens of each sequence for which a batch that nobody asked for has room, all at a time."""
STARTING_SHARE = 0.5
"""Of the memory that weights leave: what these take at most. The rest is for activations and longer
sequences.
"""
HOST_SHARE = 0.25
"""Of the host's free memory: what caches take whose size nobody asked for."""


def starting_share(fraction: float) -> tuple[float, str]:
    """Return the share of the free memory in which a batch starts where caches take `fraction` of
    it, and why so.
    """
    share = min(STARTING_SHARE, fraction)
    return (
        share,
        f"so many start with {STARTING_TOKENS} tokens each in {share:.0%} of the free memory",
    )


def lowered(limit: str, old: int, new: int, why: str) -> str:
    """Say that a limit that nobody asked for is a smaller one."""
    return f"{limit} {old:,} -> {new:,}: {why}"


@dataclass(frozen=True)
class Limits:
    """What a run is made for."""

    max_batch_size: int
    max_seq_len: int
    """Tokens of a sequence, prompt included."""
    max_num_tokens: int
    """Tokens of a step."""
    page_size: int
    snapshots: int = 0
    """Recurrent states that are kept for requests to come."""
    max_tokens: int | None = None
    """Upper bound on cached tokens over all sequences; None: what all sequences together can
    fill.
    """

    @property
    def pages_per_sequence(self) -> int:
        """Pages of a longest sequence."""
        return -(-self.max_seq_len // self.page_size)

    @property
    def most_tokens(self) -> int:
        """Tokens that a step can have."""
        return min(self.max_num_tokens, self.max_batch_size * self.max_seq_len)

    @property
    def num_slots(self) -> int:
        """Slots of recurrent states: the spare 0, those of a batch, those kept for later, and that
        of one alone.
        """
        return self.max_batch_size + self.snapshots + 2

    @property
    def useful_pages(self) -> int:
        """Pages that sequences can fill, and the spare one."""
        pages = self.max_batch_size * self.pages_per_sequence
        if self.max_tokens is not None:
            pages = min(pages, -(-self.max_tokens // self.page_size))
        return 1 + pages

    def serving(self, *, batch: int, context: int) -> Limits:
        """Return the limits of a run for `batch` sequences of `context` tokens; states are kept as
        it keeps them.
        """
        kept = batch if self.snapshots == self.max_batch_size else self.snapshots
        return replace(
            self, max_batch_size=batch, max_seq_len=context, snapshots=kept, max_tokens=None
        )

    def window(self, resource: CacheResource) -> int | None:
        """Return the keys that a query sees of a cache, None when these can be all of them."""
        window = resource.sliding_window if isinstance(resource, KVPagedResource) else None
        return window if window is not None and window < self.max_seq_len else None

    def window_pages(self, window: int) -> int:
        """Return the most pages of a window that are in use at a time, and the spare one.

        That is what the next query sees of each sequence of a batch, and of one alone, with a page
        more at either end since windows begin and end anywhere in one; and the tokens of the step,
        since pages are freed after it.
        """
        of_sequence = -(-(window - 1) // self.page_size) + 2
        return (
            1 + (self.max_batch_size + 1) * of_sequence + -(-self.max_num_tokens // self.page_size)
        )


@dataclass(frozen=True)
class CachePlan:
    """How many pages or slots every cache gets, and what they take together."""

    limits: Limits
    resources: tuple[CacheResource, ...]

    @property
    def windows(self) -> list[int | None]:
        """What the groups of pages see, in the order of their caches: those that see equally far
        back are one.
        """
        paged = (each for each in self.resources if not each.by_sequence)
        return list(dict.fromkeys(map(self.limits.window, paged)))

    def units(self, resource: CacheResource, pages: int) -> int:
        """Return the pages, or the slots, that a cache has when sequences share `pages` pages (the
        spare included).

        A window's pages are as many as can be in use; `pages` bounds them, since no sequence has
        more of a window than of all.
        """
        if resource.by_sequence:
            return self.limits.num_slots
        window = self.limits.window(resource)
        return pages if window is None else min(pages, self.limits.window_pages(window))

    def num_bytes(self, pages: int) -> int:
        """Return the bytes of all caches with `pages` pages."""
        return sum(each.num_bytes(self.units(each, pages)) for each in self.resources)

    def pages_within(self, budget: float) -> int:
        """Return the most useful pages whose caches take no more than `budget` bytes, 0 when not
        even one does.
        """
        low, high = 0, self.limits.useful_pages
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.num_bytes(middle) <= budget else (low, middle - 1)
        return low

    def longest(self, pages: int) -> int:
        """Return the most tokens that a sequence can have when it has `pages` pages to itself (the
        spare included).
        """
        size, limits = self.limits.page_size, self.limits
        paged = (each for each in self.resources if not each.by_sequence)
        held = (((self.units(each, pages) - 1) * size, limits.window(each)) for each in paged)
        return min(
            (tokens for tokens, window in held if window is None or tokens < window + 2 * size),
            default=limits.max_seq_len,
        )

    def fitting_batch(self, budget: float) -> int:
        """Return the most sequences, no more than allowed and one at least, that can start with
        `budget` bytes.

        Each has its states and `STARTING_TOKENS` tokens, or as many as it may.
        """
        low, high = 1, self.limits.max_batch_size
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._starting(middle) <= budget else (low, middle - 1)
        return low

    def _starting(self, batch: int) -> int:
        """Return the bytes with which as many sequences start."""
        context = min(STARTING_TOKENS, self.limits.max_seq_len)
        plan = replace(self, limits=self.limits.serving(batch=batch, context=context))
        return plan.num_bytes(plan.limits.useful_pages)

    def groups(self, pages: int) -> list[CacheGroup]:
        """Return the caches by form, in the order in which the forms first occur."""
        counts = Counter(self.resources)
        return [CacheGroup(form, count, self.units(form, pages)) for form, count in counts.items()]


@dataclass(frozen=True)
class CacheGroup:
    """Caches of one form: those of all layers that keep the same heads, sizes, dtype and window, or
    the same state.
    """

    resource: CacheResource
    caches: int
    units: int
    """Pages, or slots, of each; the spare one included."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return self.caches * self.resource.num_bytes(self.units)

    @property
    def form(self) -> str:
        """What one of them keeps, in words."""
        kind = str(self.resource.dtype).removeprefix("torch.")
        if not isinstance(self.resource, KVPagedResource):
            return f"state {' x '.join(map(str, self.resource.state_shape))}, {kind}"
        window = self.resource.sliding_window
        heads = f"{self.resource.num_kv_heads} x {self.resource.head_dim}, {kind}"
        return heads if window is None else f"{heads}, window {window:,}"


@dataclass(frozen=True)
class MemoryPlan:
    """Everything that a run of one model allocates; all sizes in bytes."""

    cache: CachePlan
    parameters: int
    """Elements of the weights."""
    weights: int
    tables: int
    """Buffers, as those of rotary embeddings."""
    inputs: int
    """Tokens, positions and metadata of a step."""
    activations: int
    """The most that a step of `step_tokens` tokens keeps at a time."""
    step_tokens: int
    graphs: int
    """Decode steps that are captured as CUDA graphs."""
    reserve: int
    """What the device's driver and libraries hold."""
    memory: int
    """The whole device's."""
    fraction: float
    """Share of what is left that the caches may take."""
    positions: int
    """The longest context that the model has; the run's when its config does not say."""
    devices: int = 1
    """That the sizes are for, all together."""
    wanted: tuple[int, int] | None = None
    """Sequences, and tokens of each, for which `devices_needed` counts; None: what the limits
    allow.
    """
    span: int = 1
    """Activations and graphs may take so many times less; 1: they were counted."""
    chosen: tuple[str, ...] = ()
    """The limits that nobody asked for: they may be lowered to what fits."""

    @property
    def limits(self) -> Limits:
        """What the run is made for."""
        return self.cache.limits

    @property
    def fixed(self) -> int:
        """What is there before any cache and graph."""
        return self.weights + self.tables + self.inputs + self.activations + self.reserve

    @property
    def left(self) -> int:
        """What caches and graphs can have; negative when the model alone is too large."""
        return self.memory - self.fixed

    @property
    def budget(self) -> int:
        """What the caches can have."""
        return int(min(self.fraction * self.left, self.left - self.graphs))

    @property
    def pages(self) -> int:
        """Pages that a run allocates, the spare one included."""
        return self.cache.pages_within(self.budget)

    @property
    def caches(self) -> int:
        """Bytes of the caches that a run allocates."""
        return self.cache.num_bytes(self.pages)

    @property
    def total(self) -> int:
        """Bytes of it all."""
        return self.fixed + self.graphs + self.caches

    def fits(self) -> bool:
        """Whether all sequences of a batch can be as long as they may, all at a time."""
        return self.pages >= self.limits.useful_pages

    def fits_one(self) -> bool:
        """Whether a single sequence can be as long as it may."""
        return self.pages > min(self.limits.pages_per_sequence, self.limits.useful_pages - 1)

    def for_limits(self, *, batch: int, context: int) -> MemoryPlan:
        """Return the plan for other limits; steps stay as large, and graphs grow with the batch."""
        limits = self.limits.serving(batch=batch, context=context)
        per_sequence = self.graphs / self.limits.max_batch_size
        return replace(
            self, cache=replace(self.cache, limits=limits), graphs=round(per_sequence * batch)
        )

    def with_limits(self, limits: Limits) -> MemoryPlan:
        """Return the plan of the same model and batch for other limits."""
        return replace(self, cache=replace(self.cache, limits=limits))

    def least(self) -> MemoryPlan:
        """Return the plan with the least that activations and graphs may take."""
        activations, graphs = (each // self.span for each in (self.activations, self.graphs))
        return replace(self, activations=activations, graphs=graphs, span=1)

    def over(self, count: int, memory: int) -> MemoryPlan:
        """Return the plan for `count` devices of `memory` bytes that share weights and caches
        evenly.

        They count as one of all their memory. Tables, a step's tensors and what drivers hold are on
        each of them.
        """
        each = ("tables", "inputs", "activations", "graphs", "reserve")
        sizes = {name: count * getattr(self, name) // self.devices for name in each}
        return replace(self, memory=count * memory, devices=count, **sizes)

    def devices_needed(self, memory: int) -> int | None:
        """Return how many devices of `memory` bytes all sequences need: the least power of two,
        None above 64.
        """
        batch, context = self.wanted or (0, 0)
        plan = self.for_limits(batch=batch, context=context) if self.wanted else self
        return next(
            (count for count in (1, 2, 4, 8, 16, 32, 64) if plan.over(count, memory).fits()), None
        )

    def ladder(self) -> list[int]:
        """Return contexts to show: powers of two from 1,024 on, the longest that the model has, and
        that of the run.
        """
        powers = [1 << exponent for exponent in range(10, 21) if 1 << exponent < self.positions]
        return sorted({*powers, self.positions, self.limits.max_seq_len})

    def sequence_bytes(self, context: int) -> int:
        """Return what a sequence of `context` tokens takes of the caches."""
        two, one = (self.for_limits(batch=batch, context=context).cache for batch in (2, 1))
        return two.num_bytes(two.limits.useful_pages) - one.num_bytes(one.limits.useful_pages)

    def longest_context(self) -> int:
        """Return the most tokens of a sequence that has the caches to itself, 0 when not even a
        page's fit.
        """
        low, high = 0, -(-self.positions // self.limits.page_size)
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.for_limits(batch=1, context=middle * self.limits.page_size).fits()
            low, high = (middle, high) if fits else (low, middle - 1)
        return min(low * self.limits.page_size, self.positions)

    def largest_batch(self, context: int) -> int:
        """Return the most sequences of `context` tokens that fit at a time; a step has at least a
        token of each.
        """
        low, high = 0, max(self.step_tokens, 1)
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.for_limits(batch=middle, context=context).fits()
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


def tensor_bytes(tensors: Iterable[object]) -> int:
    """Return the bytes of tensors, those that are the same object once."""
    return sum(each.nbytes for each in {id(tensor): tensor for tensor in tensors}.values())  # type: ignore[attr-defined]
