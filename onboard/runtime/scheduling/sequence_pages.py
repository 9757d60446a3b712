"""The pages and slots of each sequence, and prefix reuse: pages and state snapshots that earlier
requests left in the cache.

A full page is found by a digest of its tokens and of all tokens before them, so that a request with
the same prefix reuses it (Zheng et al. 2024, "SGLang"; Kwon et al. 2023). A group of pages with a
sliding window holds only the pages that the next query sees. A recurrent state cannot be put
together from pages: a snapshot of it is kept at page borders where a prompt's chunk ended, and a
request starts from the last border for which all pages and the snapshot are cached.
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
"""(source slot, target slot) -> None: copies the recurrent states of a sequence."""


@dataclass
class MemoryStats:
    """Counters of prefix reuse and of page use."""

    reused_tokens: int = 0
    """Tokens found in the prefix cache, which were not computed again."""
    prefix_hits: int = 0
    """Admissions that reused at least one page."""
    state_snapshots: int = 0
    """Snapshots taken of recurrent states."""
    most_pages: int = 0
    """Largest number of pages in use at once, over all groups."""


class SequencePages:
    """Allocates pages and slots to the running sequences. A waiting request holds none.

    `snapshots` is the number of snapshots of recurrent states, which lie in the slots after those
    of the batch; None: the model has no recurrent states.
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
        """Remainders, modulo the page size, of a number of cached tokens at which a page is full or
        has left a window.
        """
        self._freed = 0  # how often pages were freed: a refused request is tried again after that
        self._refused: tuple[Request, int] | None = None

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent states."""
        return self._snapshots is not None

    @property
    def num_owned(self) -> int:
        """Number of pages in use, over all groups."""
        return sum(group.allocator.num_owned for group in self.groups)

    @property
    def capacity(self) -> int:
        """Maximum number of tokens of a sequence that has the cache to itself.

        A group with a window sets no limit if its pages hold the window and two pages more.
        """
        size = self.page_size
        held = ((group.allocator.num_usable * size, group.window) for group in self.groups)
        return min(
            (most for most, window in held if window is None or most < window + 2 * size),
            default=sys.maxsize,
        )

    def room_for(self, request: Request) -> int | None:
        """Return how many leading pages a waiting request would reuse; None if it cannot be
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
        """Allocate a slot and pages to a request; the first `border` pages are reused.

        Groups without a window get the pages for all its tokens now, groups with one get them chunk
        by chunk (`reserve`).
        """
        [request.slot], request.rows = self.slots.take(1), self.rows
        self.rows.start(request.slot, request.tokens)
        self.rows.set_sampling(request.slot, request.params.row(), request.key)
        self.rows.adapters[request.slot] = request.adapter
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
        """Allocate pages for `length` more tokens of a sequence; return False, without a change, if
        too few are free.
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
        """Return how many of the next `length` tokens one step may compute.

        Pages that leave a window are freed only after the step, so the step's new tokens need pages
        beside them. With recurrent states a prompt's chunk ends where a snapshot is useful: where
        an earlier prompt branched off, at the prompt's last page border, or else at any page
        border.
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
        """Return the digests of the pages that a chunk completes."""
        if not self.reuse:
            return ()
        request, start = chunk.sequence, chunk.sequence.num_cached
        last = min(start + chunk.length, len(request.tokens)) // self.page_size
        return self._digests(request, last)[start // self.page_size : last]

    def awaits(self, request: Request, border: int) -> bytes | None:
        """Return the digest of the first full page that a request would have to compute; None if
        there is none.
        """
        if not self.reuse or border >= self._last_border(request):
            return None
        return self._digests(request, border + 1)[border]

    def at_borders(self, ends: IntArray, lengths: IntArray | None) -> list[int]:
        """Return the indices of sequences that passed one of the `borders`, for which `computed`
        must be called.

        `ends` [sequences] are the cached tokens now, `lengths` [sequences] how many of them are
        new; None: one for each sequence.
        """
        passed = (ends - np.array(self.borders)[:, None]) % self.page_size < (
            1 if lengths is None else lengths
        )
        rows: list[int] = np.flatnonzero(passed.any(0)).tolist()
        return rows

    def computed(self, request: Request, length: int) -> None:
        """Publish the pages completed by the last `length` cached tokens for reuse, and free pages
        that have left their window. The host must know all these tokens.
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
        """Discard the cached tokens of a running sequence: they are computed again, with another
        rotary table and so under other digests.
        """
        self._give_back_pages(request)
        request.pages = [[] for _ in self.groups]
        request.digests = []
        request.branch = 0
        request.num_admitted = len(request.tokens)
        self.rows.start(request.slot, request.tokens)

    def back_up(self, request: Request) -> None:
        """Copy the recurrent states of a sequence aside, if the model has some, before a step that
        may have to be taken back.
        """
        if self._snapshots is not None:
            [request.backup] = self._snapshots.take(1)
            self._copy(request.slot, self._first_snapshot + request.backup)

    def end_backup(self, request: Request, *, restore: bool) -> bool:
        """Forget the states that were put aside; with `restore` they are the sequence's again.
        Return False where there are none.
        """
        if self._snapshots is None or not request.backup:
            return False
        if restore:
            self._copy(self._first_snapshot + request.backup, request.slot)
        self._snapshots.give_back([request.backup])
        request.backup = 0
        return restore

    def release(self, request: Request) -> None:
        """Free the pages and the slot of a sequence."""
        self.end_backup(request, restore=False)
        self._give_back_pages(request)
        self.slots.give_back([request.slot])
        request.pages, request.slot = [], 0

    def check(self) -> None:
        """Assert that every page and every slot is accounted for."""
        for allocator in (*(group.allocator for group in self.groups), self.slots):
            allocator.check()
        if self._snapshots is not None:
            self._snapshots.check()
            assert not self._snapshots.num_owned, "a snapshot is owned"

    def _known_border(self, request: Request) -> int:
        """Return how many leading pages the request can reuse; set `request.branch` to where it
        leaves the longest cached prefix.
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
        """Whether the request can start after `border` reused pages: the window's pages and the
        state's snapshot are cached, and no image is split.
        """
        end, digests = border * self.page_size, request.digests
        if self._snapshots is not None and self._snapshots.find(digests[border - 1]) is None:
            return False
        if request.image_inputs is not None and request.image_inputs.fitting(0, end) != end:
            return False
        return all(
            group.allocator.find(digest) is not None
            for group in self.groups
            if group.window is not None
            for digest in digests[group.first_key(end) // self.page_size : border]
        )

    def _fits(self, index: int, request: Request, border: int) -> bool:
        """Whether a group has enough free pages for a request that reuses `border` pages."""
        group = self.groups[index]
        missing = self._pages_for(len(request.tokens)) - border
        if group.window is not None:  # the most that it uses at once
            missing = min(missing, self._pages_for(group.window + self.max_num_tokens))
        first = group.first_key(border * self.page_size) // self.page_size
        found = (group.allocator.find(digest) for digest in request.digests[first:border])
        idle = sum(page is not None and group.allocator.is_idle(page) for page in found)
        return min(missing + idle, group.allocator.num_usable) <= group.allocator.num_free

    def _shared(self, request: Request, group: PageGroup, border: int) -> list[int]:
        """Reuse the pages before `border` that the next query sees."""
        first = group.first_key(border * self.page_size) // self.page_size
        pages = [group.allocator.find(digest) or 0 for digest in request.digests[first:border]]
        assert all(pages)
        for page in pages:
            group.allocator.share(page)
        return [0] * min(first, border) + pages

    def _restore(self, request: Request, border: int) -> None:
        """Copy the snapshot of the recurrent states after `border` pages, if the model has states,
        to the request's slot.
        """
        if self._snapshots is None:
            return
        snapshot = self._snapshots.find(request.digests[border - 1])
        assert snapshot is not None
        self._copy(self._first_snapshot + snapshot, request.slot)
        self._snapshots.share(snapshot)  # with the next line: marks it as the most recently used
        self._snapshots.give_back([snapshot])

    def _keep(self, request: Request, first: int, last: int) -> None:
        """Publish pages `first` to `last` for reuse, and a snapshot of the states if a prompt's
        chunk ended at the last border.
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
        """Allocate pages of one group so that a sequence has room for `tokens` tokens in all."""
        missing = self._pages_for(tokens) - len(request.pages[index])
        if missing > 0:
            self._append(request, index, self.groups[index].allocator.take(missing))
            self.stats.most_pages = max(self.stats.most_pages, self.num_owned)

    def _append(self, request: Request, index: int, pages: list[int]) -> None:
        self.rows.set_pages(request.slot, index, len(request.pages[index]), pages)
        request.pages[index] += pages
        request.room = min(map(len, request.pages)) * self.page_size

    def _free_behind(self, request: Request, index: int, first: int) -> None:
        """Free a sequence's pages of one group before page index `first`."""
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
        """Return the digests of a request's first `pages` pages, which must be full."""
        digests, size = request.digests, self.page_size
        for index in range(len(digests), pages):
            start, end = index * size, (index + 1) * size
            before = (digests[-1] if digests else b"") + request.digest_salt(start, end)
            tokens = array("q", request.tokens[start:end])
            digests.append(hashlib.blake2b(before + tokens.tobytes(), digest_size=16).digest())
        return digests[:pages]

    def _last_border(self, request: Request) -> int:
        """Return the largest number of pages that a request can reuse: at least one token must be
        left to compute.
        """
        return (len(request.tokens) - 1) // self.page_size

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
