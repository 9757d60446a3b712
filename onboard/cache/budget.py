"""The memory plan of a run: the run allocates by it, and `onboard plan` shows it.

Weights, rotary tables and caches are exact: their tensors are counted. Activations are the largest
total of the graph's intermediate tensors at any moment. The memory of the driver and of libraries
is an estimate (`CUDA_RESERVE`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from onboard.cache.resources import CacheResource, KVPagedResource

CUDA_RESERVE = 768 * 2**20
"""Bytes of a GPU outside of torch's allocator: context, kernels, library workspaces; measured on an
H100.
"""
STARTING_TOKENS = 512
"""A default batch size is such that all its sequences can start with this many tokens each."""
STARTING_SHARE = 0.5
"""Largest share of the memory beside the weights that those tokens may take; the rest is for
activations and longer sequences.
"""
HOST_SHARE = 0.25
"""Share of the host's free memory that caches of a default size take on the CPU."""


def starting_share(fraction: float) -> tuple[float, str]:
    """Return the share of the free memory in which a batch must be able to start, and the reason as
    text; `fraction` is the caches' share.
    """
    share = min(STARTING_SHARE, fraction)
    return (
        share,
        f"so many start with {STARTING_TOKENS} tokens each in {share:.0%} of the free memory",
    )


def lowered(limit: str, old: int, new: int, why: str) -> str:
    """Return the text of a fact: a default limit was lowered."""
    return f"{limit} {old:,} -> {new:,}: {why}"


@dataclass(frozen=True)
class Limits:
    """Upper bounds that a run's buffers and caches are sized for."""

    max_batch_size: int
    max_seq_len: int
    """Tokens of a sequence, prompt included."""
    max_num_tokens: int
    """New tokens of a step."""
    page_size: int
    snapshots: int = 0
    """Number of snapshots of recurrent states, kept for later requests."""
    max_tokens: int | None = None
    """Upper bound on cached tokens over all sequences; None: `max_batch_size * max_seq_len`."""

    @property
    def pages_per_sequence(self) -> int:
        """Pages of a sequence of `max_seq_len` tokens."""
        return -(-self.max_seq_len // self.page_size)

    @property
    def most_tokens(self) -> int:
        """Largest number of new tokens that a step can have."""
        return min(self.max_num_tokens, self.max_batch_size * self.max_seq_len)

    @property
    def num_slots(self) -> int:
        """Number of slots: the spare slot 0, one for each sequence of a batch, the snapshots, and
        one for `Engine.logits`.
        """
        return self.max_batch_size + self.snapshots + 2

    @property
    def useful_pages(self) -> int:
        """Largest number of pages that sequences can fill, and the spare one."""
        pages = self.max_batch_size * self.pages_per_sequence
        if self.max_tokens is not None:
            pages = min(pages, -(-self.max_tokens // self.page_size))
        return 1 + pages

    def serving(self, *, batch: int, context: int) -> Limits:
        """Return the limits of a run for `batch` sequences of `context` tokens; snapshots grow with
        the batch where they are one a sequence.
        """
        each, others = divmod(self.snapshots, self.max_batch_size)
        kept = self.snapshots if others else each * batch
        return replace(
            self, max_batch_size=batch, max_seq_len=context, snapshots=kept, max_tokens=None
        )

    def window(self, resource: CacheResource) -> int | None:
        """Return the number of keys of a cache that a query sees; None: all keys of a sequence."""
        window = resource.sliding_window if isinstance(resource, KVPagedResource) else None
        return window if window is not None and window < self.max_seq_len else None

    def window_pages(self, window: int) -> int:
        """Return the largest number of pages of a window in use at once, and the spare one.

        Each sequence of a batch, and one of `Engine.logits`, needs the pages of its window and one
        more at either end, since a window may begin and end within a page. The step's new tokens
        need pages beside them, since pages are freed after the step.
        """
        of_sequence = -(-(window - 1) // self.page_size) + 2
        return (
            1 + (self.max_batch_size + 1) * of_sequence + -(-self.max_num_tokens // self.page_size)
        )


@dataclass(frozen=True)
class CachePlan:
    """The caches of a run: pages or slots of each, and their bytes."""

    limits: Limits
    resources: tuple[CacheResource, ...]

    @property
    def windows(self) -> list[int | None]:
        """The window of each group of pages, in the order of the caches: caches with equal windows
        are one group.
        """
        paged = (each for each in self.resources if not each.by_sequence)
        return list(dict.fromkeys(map(self.limits.window, paged)))

    def units(self, resource: CacheResource, pages: int) -> int:
        """Return the number of pages or slots of a cache; `pages` is that of a cache without a
        window, the spare page included.

        A cache with a window gets the pages that can be in use at once, at most `pages`.
        """
        if resource.by_sequence:
            return self.limits.num_slots
        window = self.limits.window(resource)
        return pages if window is None else min(pages, self.limits.window_pages(window))

    def num_bytes(self, pages: int) -> int:
        """Return the bytes of all caches with `pages` pages."""
        return sum(each.num_bytes(self.units(each, pages)) for each in self.resources)

    def pages_within(self, budget: float) -> int:
        """Return the largest useful number of pages whose caches take at most `budget` bytes, 0 if
        even one takes more.
        """
        low, high = 0, self.limits.useful_pages
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.num_bytes(middle) <= budget else (low, middle - 1)
        return low

    def longest(self, pages: int) -> int:
        """Return the largest number of tokens of one sequence that has all `pages` pages, the spare
        included.
        """
        size, limits = self.limits.page_size, self.limits
        paged = (each for each in self.resources if not each.by_sequence)
        held = (((self.units(each, pages) - 1) * size, limits.window(each)) for each in paged)
        return min(
            (tokens for tokens, window in held if window is None or tokens < window + 2 * size),
            default=limits.max_seq_len,
        )

    def fitting_batch(self, budget: float) -> int:
        """Return the largest batch size, between 1 and the limit, whose sequences can all start
        within `budget` bytes.

        Each needs its states and pages for `STARTING_TOKENS` tokens, or `max_seq_len` if that is
        less.
        """
        low, high = 1, self.limits.max_batch_size
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._starting(middle) <= budget else (low, middle - 1)
        return low

    def _starting(self, batch: int) -> int:
        """Return the bytes that the caches need for a batch of sequences to start."""
        context = min(STARTING_TOKENS, self.limits.max_seq_len)
        plan = replace(self, limits=self.limits.serving(batch=batch, context=context))
        return plan.num_bytes(plan.limits.useful_pages)

    def groups(self, pages: int) -> list[CacheGroup]:
        """Return the caches grouped by equal resources, in the order of their first use."""
        counts = Counter(self.resources)
        return [CacheGroup(form, count, self.units(form, pages)) for form, count in counts.items()]


@dataclass(frozen=True)
class CacheGroup:
    """The caches of all layers with equal resources: the same heads, sizes, dtype and window, or
    the same state.
    """

    resource: CacheResource
    caches: int
    units: int
    """Pages or slots of each cache, the spare one included."""

    @property
    def num_bytes(self) -> int:
        """Bytes of these caches together."""
        return self.caches * self.resource.num_bytes(self.units)

    @property
    def form(self) -> str:
        """The resource in words, for the plan's table."""
        kind = str(self.resource.dtype).removeprefix("torch.")
        if not isinstance(self.resource, KVPagedResource):
            return f"state {' x '.join(map(str, self.resource.state_shape))}, {kind}"
        window = self.resource.sliding_window
        count = self.resource.num_kv_heads
        heads = f"{count} head{'s' if count > 1 else ''} of size {self.resource.head_dim}, {kind}"
        return heads if window is None else f"{heads}, window {window:,}"


@dataclass(frozen=True)
class TowerMemory:
    """What towers for images or sound take beside a text graph, in bytes."""

    weights: int = 0
    """Parameters and buffers, without the token embedding, which is the text graph's."""
    activations: int = 0
    """Peak of the intermediate tensors while one image or sound is read; no step runs meanwhile."""


@dataclass(frozen=True)
class MemoryPlan:
    """Everything that a run of one model allocates; all sizes in bytes."""

    cache: CachePlan
    parameters: int
    """Elements of the weights."""
    weights: int
    tables: int
    """Buffers, such as the tables of rotary embeddings."""
    inputs: int
    """The step buffer: tokens, positions and metadata."""
    activations: int
    """Peak of the intermediate tensors in a step of `step_tokens` tokens, or while towers read."""
    step_tokens: int
    graphs: int
    """Captured CUDA graphs of decode steps."""
    reserve: int
    """Memory of the device's driver and of libraries."""
    memory: int
    """Total memory of the device."""
    fraction: float
    """Share of the remaining memory that the caches may take."""
    positions: int
    """Longest context that the model allows; the run's limit if its config names none."""
    devices: int = 1
    """Number of devices that the sizes are summed over."""
    wanted: tuple[int, int] | None = None
    """(sequences, tokens of each) for which `devices_needed` counts; None: the limits."""
    span: int = 1
    """Activations and graphs are upper bounds, at most this many times too large; 1: exact."""
    towers: int = 0
    """Weights of towers for images or sound, which one device has."""
    chosen: tuple[str, ...] = ()
    """Names of the limits that are defaults: they may be lowered to what fits."""
    ranks: int = 1
    """How many processes, each with a device of its own, take these sizes each."""

    @property
    def is_in_16_bits(self) -> bool:
        """Whether weights take two bytes an element."""
        return self.weights == 2 * self.parameters

    def sparing(self, size: int) -> MemoryPlan:
        """Return the plan where weights that stay quantised take so many bytes less, which they do
        in runs in 16 bits.
        """
        return replace(self, weights=self.weights - size) if self.is_in_16_bits else self

    @property
    def limits(self) -> Limits:
        """The limits of the run."""
        return self.cache.limits

    @property
    def fixed(self) -> int:
        """Bytes beside caches and CUDA graphs."""
        held = self.weights + self.towers + self.tables
        return held + self.inputs + self.activations + self.reserve

    @property
    def left(self) -> int:
        """Bytes left for caches and CUDA graphs; negative if the model alone is too large."""
        return self.memory - self.fixed

    @property
    def budget(self) -> int:
        """Bytes that the caches may take."""
        return int(min(self.fraction * self.left, self.left - self.graphs))

    @property
    def pages(self) -> int:
        """Number of pages that a run allocates, the spare one included."""
        return self.cache.pages_within(self.budget)

    @property
    def caches(self) -> int:
        """Bytes of the caches that a run allocates."""
        return self.cache.num_bytes(self.pages)

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.fixed + self.graphs + self.caches

    def fits(self) -> bool:
        """Whether all sequences of a batch fit at `max_seq_len` tokens, at the same time."""
        return self.pages >= self.limits.useful_pages

    def fits_one(self) -> bool:
        """Whether a single sequence of `max_seq_len` tokens fits."""
        return self.pages > min(self.limits.pages_per_sequence, self.limits.useful_pages - 1)

    def for_limits(self, *, batch: int, context: int) -> MemoryPlan:
        """Return the plan for another batch size and context; the step's size stays, and CUDA
        graphs grow with the batch.
        """
        limits = self.limits.serving(batch=batch, context=context)
        per_sequence = self.graphs / self.limits.max_batch_size
        return replace(
            self, cache=replace(self.cache, limits=limits), graphs=round(per_sequence * batch)
        )

    def with_limits(self, limits: Limits) -> MemoryPlan:
        """Return the plan of the same model and batch for other limits."""
        return replace(self, cache=replace(self.cache, limits=limits))

    def least(self) -> MemoryPlan:
        """Return the plan with the lower bounds of activations and graphs."""
        activations, graphs = (each // self.span for each in (self.activations, self.graphs))
        return replace(self, activations=activations, graphs=graphs, span=1)

    def over(self, count: int, memory: int) -> MemoryPlan:
        """Return the plan for `count` devices of `memory` bytes that share weights and caches
        evenly.

        They count as one device with all their memory. Tables, the step's tensors and the drivers'
        memory are on each of them.
        """
        each = ("tables", "inputs", "activations", "graphs", "reserve")
        sizes = {name: count * getattr(self, name) // self.devices for name in each}
        return replace(self, memory=count * memory, devices=count, **sizes)

    def devices_needed(self, memory: int) -> int | None:
        """Return how many devices of `memory` bytes all sequences need, a power of two, of several
        ranks one each; None if more than 64, or if one does not hold a rank.
        """
        batch, context = self.wanted or (0, 0)
        plan = self.for_limits(batch=batch, context=context) if self.wanted else self
        counts = (1,) if self.ranks > 1 else (1, 2, 4, 8, 16, 32, 64)
        enough = (count * self.ranks for count in counts if plan.over(count, memory).fits())
        return next(enough, None)

    def ladder(self) -> list[int]:
        """Return the context lengths to show: powers of two from 1,024 on, the model's longest, and
        the run's.
        """
        powers = [1 << exponent for exponent in range(10, 21) if 1 << exponent < self.positions]
        return sorted({*powers, self.positions, self.limits.max_seq_len})

    def sequence_bytes(self, context: int) -> int:
        """Return the cache bytes of a sequence of `context` tokens."""
        two, one = (self.for_limits(batch=batch, context=context).cache for batch in (2, 1))
        return two.num_bytes(two.limits.useful_pages) - one.num_bytes(one.limits.useful_pages)

    def longest_context(self) -> int:
        """Return the largest number of tokens of a sequence that has the caches to itself, 0 if not
        even one page fits.
        """
        low, high = 0, -(-self.positions // self.limits.page_size)
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.for_limits(batch=1, context=middle * self.limits.page_size).fits()
            low, high = (middle, high) if fits else (low, middle - 1)
        return min(low * self.limits.page_size, self.positions)

    def largest_batch(self, context: int) -> int:
        """Return the largest batch of sequences of `context` tokens that fits; a step has at least
        one token of each.
        """
        low, high = 0, max(self.step_tokens, 1)
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.for_limits(batch=middle, context=context).fits()
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


def tensor_bytes(tensors: Iterable[object]) -> int:
    """Return the bytes of tensors, counting each object once."""
    return sum(each.nbytes for each in {id(tensor): tensor for tensor in tensors}.values())  # type: ignore[attr-defined]
