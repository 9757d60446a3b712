"""What each sequence holds of the caches: pages, a slot, and what earlier requests left behind.

A full page is known by a digest of its tokens and of all before them, so that a later request that
begins alike takes it over instead of computing it (Zheng et al. 2024, "SGLang"; Kwon et al. 2023).
A group of pages with a sliding window holds only those that the next query sees. Recurrent states
are no sum of pages: a copy is kept of the state at page borders where a prompt's chunk ends, and a
request goes on from the last border at which everything is known.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from onboard.cache.pages import PageAllocator, PageGroup
from onboard.cache.rows import SequenceRows
from onboard.cache.step_buffer import IntArray
from onboard.runtime.scheduling.request import Chunk, Request

CopyState = Callable[[int, int], None]
"""(source slot, target slot): copies the recurrent states of a sequence."""


@dataclass
class MemoryStats:
    """What came of looking for known prefixes, and how full the pages were."""

    reused_tokens: int = 0
    """Tokens that were found in the cache and not computed (again)."""
    prefix_hits: int = 0
    """Admissions that found some."""
    state_snapshots: int = 0
    """Copies made of recurrent states."""
    most_pages: int = 0
    """Pages in use at a time, over all groups."""


class SequencePages:
    """Pages and slots of the running sequences. A request that is not admitted holds nothing.

    `snapshots` is how many recurrent states are kept for later, in the slots behind those of a
    batch; None: the model has none.
    """

    def __init__(
        self,
        groups: Sequence[PageGroup],
        rows: SequenceRows,
        *,
        page_size: int,
        max_batch_size: int,
        max_num_tokens: int,
        reuse: bool = True,
        snapshots: int | None = None,
        copy_state: CopyState | None = None,
    ) -> None:
        self.groups = list(groups)
        self.rows = rows
        self.page_size = page_size
        self.max_num_tokens = max_num_tokens
        self.slots = PageAllocator(max_batch_size + 1)
        self.reuse = reuse and snapshots != 0
        self.stats = MemoryStats()
        self._snapshots = PageAllocator(snapshots + 1) if snapshots is not None else None
        self._first_snapshot = max_batch_size
        self._copy_state = copy_state
        windows = [group.window for group in groups if group.window is not None]
        self.borders = sorted({0, *((window - 1) % page_size for window in windows)})
        """Remainders of cached tokens at which something is due: a page is full, or has left a
        window.
        """
        self._freed = 0  # times that pages were given back
        self._refused: tuple[Request, int] | None = None

    @property
    def has_states(self) -> bool:
        """Whether sequences have recurrent states."""
        return self._snapshots is not None

    @property
    def num_owned(self) -> int:
        """Pages in use."""
        return sum(group.allocator.num_owned for group in self.groups)

    @property
    def capacity(self) -> int:
        """Most tokens that a sequence can have when it is alone.

        Pages of a window are enough for any number when they hold what a query sees and a page to
        go on with.
        """
        size = self.page_size
        held = ((group.allocator.num_usable * size, group.window) for group in self.groups)
        return min(
            (most for most, window in held if window is None or most < window + 2 * size),
            default=sys.maxsize,
        )

    def room_for(self, request: Request) -> int | None:
        """Return how many leading pages a waiting request would take over, None when it cannot be
        admitted now.
        """
        if not self.slots.num_free or (
            self.slots.num_owned and self._refused == (request, self._freed)
        ):
            return None
        border = self._known_border(request)
        if all(self._fits(index, request, border) for index in range(len(self.groups))):
            return border
        self._refused = request, self._freed
        return None

    def admit(self, request: Request, border: int) -> None:
        """Give a request a slot, the known pages before `border` and, where nothing leaves a
        window, all the others.
        """
        [request.slot], request.rows = self.slots.take(1), self.rows
        self.rows.start(request.slot, request.tokens)
        self.rows.set_sampling(request.slot, request.params.row(), request.key)
        request.pages = [[] for _ in self.groups]
        request.num_admitted = len(request.tokens)
        for index, group in enumerate(self.groups):
            self._append(request, index, self._shared(request, group, border))
            if group.window is None:
                self._grow(request, index, len(request.tokens))
        self.rows.num_cached[request.slot] = border * self.page_size
        if border:
            self._restore(request, border)
            self.stats.prefix_hits += 1
            self.stats.reused_tokens += request.num_cached
        if request.num_reused is None:
            request.num_reused = request.num_cached

    def reserve(self, request: Request, length: int) -> bool:
        """Give a sequence pages for `length` more tokens; False, and nothing has changed: too few
        are free.
        """
        total = request.num_cached + length
        wanted = self._pages_for(total)
        for pages, group in zip(request.pages, self.groups, strict=True):
            if wanted - len(pages) > group.allocator.num_free:
                return False
        for index in range(len(self.groups)):
            self._grow(request, index, total)
        return True

    def chunk(self, request: Request, length: int) -> int:
        """Return how many of the next `length` tokens may come in one step.

        What leaves a window is freed only after the step, so that one step's tokens must find room
        beside it. With recurrent states a chunk of a prompt ends where a copy of the state may be
        of use: where an earlier prompt branched off, at the last page border, and at a page border
        in any case.
        """
        start = request.num_cached
        for group in self.groups:
            if group.window is not None:
                behind = group.first_key(start) // self.page_size * self.page_size
                length = min(length, group.allocator.num_usable * self.page_size + behind - start)
        end = start + length
        if self._snapshots is None or not self.reuse or start >= request.num_admitted:
            return length
        last = self._last_border(request) * self.page_size
        borders = [border for border in (request.branch, last) if start < border < end]
        if not borders and start < (whole := end - end % self.page_size):
            borders = [whole]
        return min(borders) - start if borders else length

    def completes(self, chunk: Chunk) -> Sequence[bytes]:
        """Return the digests of the pages that a chunk fills."""
        if not self.reuse:
            return ()
        request, start = chunk.sequence, chunk.sequence.num_cached
        last = min(start + chunk.length, len(request.tokens)) // self.page_size
        return self._digests(request, last)[start // self.page_size : last]

    def awaits(self, request: Request, border: int) -> bytes | None:
        """Return the digest of the first page that a request would have to compute in full, None:
        it has none.
        """
        if not self.reuse or border >= self._last_border(request):
            return None
        return self._digests(request, border + 1)[border]

    def at_borders(self, ends: IntArray, lengths: IntArray | None) -> list[int]:
        """Return the rows for which `computed` has something to do: some of their tokens are at one
        of the `borders`.

        `ends` [rows] tokens cached by now, the last `lengths` [rows] of them since the last time;
        None: one each.
        """
        passed = (ends - np.array(self.borders)[:, None]) % self.page_size < (
            1 if lengths is None else lengths
        )
        rows: list[int] = np.flatnonzero(passed.any(0)).tolist()
        return rows

    def computed(self, request: Request, length: int) -> None:
        """Keep what the last `length` cached tokens fill, all of them known by now; free what has
        left its window.
        """
        end = request.num_cached
        start = end - length
        first, last = start // self.page_size, end // self.page_size
        if self.reuse and last > first:
            self._keep(request, first, last)
        for index, group in enumerate(self.groups):
            if group.window is not None:
                self._free_behind(request, index, group.first_key(end) // self.page_size)

    def restart(self, request: Request) -> None:
        """Forget what is cached of a running sequence: it is computed anew, under other digests."""
        self._give_back_pages(request)
        request.pages = [[] for _ in self.groups]
        request.digests = []
        request.branch = 0
        request.num_admitted = len(request.tokens)
        self.rows.start(request.slot, request.tokens)

    def release(self, request: Request) -> None:
        """Take back all that a sequence holds."""
        self._give_back_pages(request)
        self.slots.give_back([request.slot])
        request.pages, request.slot = [], 0

    def check(self) -> None:
        """Assert that no page and no slot is lost."""
        for allocator in (*(group.allocator for group in self.groups), self.slots):
            allocator.check()
        if self._snapshots is not None:
            self._snapshots.check()
            assert not self._snapshots.num_owned, "a snapshot is owned"

    def _known_border(self, request: Request) -> int:
        """Return the number of leading pages after which the request can go on; note where it
        branches off.
        """
        if not self.reuse:
            return 0
        last = self._last_border(request)
        digests, known = self._digests(request, last), last
        for allocator in (group.allocator for group in self.groups if group.window is None):
            known = next(
                (i for i, digest in enumerate(digests[:known]) if allocator.find(digest) is None),
                known,
            )
        request.branch = known * self.page_size
        return next(
            (border for border in range(known, 0, -1) if self._can_go_on(request, border)), 0
        )

    def _can_go_on(self, request: Request, border: int) -> bool:
        """Whether windows, recurrent states and blocks of the prompt allow to go on after `border`
        pages.
        """
        end, digests = border * self.page_size, request.digests
        if self._snapshots is not None and self._snapshots.find(digests[border - 1]) is None:
            return False
        if request.given is not None and request.given.fitting(0, end) != end:
            return False
        return all(
            group.allocator.find(digest) is not None
            for group in self.groups
            if group.window is not None
            for digest in digests[group.first_key(end) // self.page_size : border]
        )

    def _fits(self, index: int, request: Request, border: int) -> bool:
        """Whether a group has room for a request that takes over `border` pages."""
        group = self.groups[index]
        missing = self._pages_for(len(request.tokens)) - border
        if group.window is not None:  # what it needs at a time
            missing = min(missing, self._pages_for(group.window + self.max_num_tokens))
        first = group.first_key(border * self.page_size) // self.page_size
        found = (group.allocator.find(digest) for digest in request.digests[first:border])
        idle = sum(page is not None and group.allocator.is_idle(page) for page in found)
        return min(missing + idle, group.allocator.num_usable) <= group.allocator.num_free

    def _shared(self, request: Request, group: PageGroup, border: int) -> list[int]:
        """Take over the pages before `border` that the next query sees."""
        first = group.first_key(border * self.page_size) // self.page_size
        pages = [group.allocator.find(digest) or 0 for digest in request.digests[first:border]]
        assert all(pages)
        for page in pages:
            group.allocator.share(page)
        return [0] * min(first, border) + pages

    def _restore(self, request: Request, border: int) -> None:
        """Copy the recurrent states behind `border` pages, if the model has any, to the request's
        slot.
        """
        if self._snapshots is None:
            return
        snapshot = self._snapshots.find(request.digests[border - 1])
        assert snapshot is not None
        self._copy(self._first_snapshot + snapshot, request.slot)
        self._snapshots.share(snapshot)  # it was used last
        self._snapshots.give_back([snapshot])

    def _keep(self, request: Request, first: int, last: int) -> None:
        """Let later requests find the pages from `first` to `last`, and the states behind them
        where a chunk ended.
        """
        digests = self._digests(request, last)
        for pages, group in zip(request.pages, self.groups, strict=True):
            for index in range(first, last):
                group.allocator.keep(pages[index], digests[index])
        snapshots, end = self._snapshots, request.num_cached
        if snapshots is None or end != last * self.page_size or end > request.num_admitted:
            return
        if snapshots.find(digests[last - 1]) is None:
            [snapshot] = snapshots.take(1)
            self._copy(request.slot, self._first_snapshot + snapshot)
            snapshots.keep(snapshot, digests[last - 1])
            snapshots.give_back([snapshot])
            self.stats.state_snapshots += 1

    def _copy(self, source: int, target: int) -> None:
        assert self._copy_state is not None
        self._copy_state(source, target)

    def _grow(self, request: Request, index: int, tokens: int) -> None:
        """Give a sequence pages of one group for `tokens` tokens in all."""
        missing = self._pages_for(tokens) - len(request.pages[index])
        if missing > 0:
            self._append(request, index, self.groups[index].allocator.take(missing))
            self.stats.most_pages = max(self.stats.most_pages, self.num_owned)

    def _append(self, request: Request, index: int, pages: list[int]) -> None:
        self.rows.set_pages(request.slot, index, len(request.pages[index]), pages)
        request.pages[index] += pages
        request.room = min(map(len, request.pages)) * self.page_size

    def _free_behind(self, request: Request, index: int, first: int) -> None:
        """Free the pages of a group before page number `first`."""
        pages = request.pages[index]
        count = first
        while count and pages[count - 1]:
            count -= 1
        if gone := pages[count:first]:
            self.groups[index].allocator.give_back(gone)
            pages[count:first] = [0] * len(gone)
            self.rows.set_pages(request.slot, index, count, pages[count:first])
            self._freed += 1

    def _give_back_pages(self, request: Request) -> None:
        for pages, group in zip(request.pages, self.groups, strict=True):
            group.allocator.give_back([page for page in pages if page])
        request.room = 0
        self._freed += 1

    def _digests(self, request: Request, pages: int) -> list[bytes]:
        """Return the digests of a request's first `pages` pages, all of whose tokens are known."""
        digests, size = request.digests, self.page_size
        for index in range(len(digests), pages):
            before = digests[-1] if digests else request.digest_salt()
            tokens = array("q", request.tokens[index * size : (index + 1) * size])
            digests.append(hashlib.blake2b(before + tokens.tobytes(), digest_size=16).digest())
        return digests[:pages]

    def _last_border(self, request: Request) -> int:
        """Return the most pages that a request can take over: one token at least is left to
        compute.
        """
        return (len(request.tokens) - 1) // self.page_size

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
