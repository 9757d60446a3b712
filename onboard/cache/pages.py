"""The page allocator: free, owned and idle pages, with reference counts and lookup by content.

Paging with shared pages follows Kwon et al. 2023, "Efficient Memory Management for Large Language
Model Serving with PagedAttention"; pages without an owner are evicted in the order of their last
use. The same class allocates slots and snapshots of recurrent states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onboard.errors import OnboardError


class PageAllocator:
    """Allocates page numbers from 1 on; page 0 is spare: padding writes there, no sequence owns it.

    A page may have several owners (`share`). A page whose content has a digest (`keep`) becomes
    idle, not free, when its last owner gives it back: `find` returns it until `take` evicts it.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_evicted = 0
        """Number of idle pages evicted so far."""
        self._free = list(range(num_pages - 1, 0, -1))
        self._owners: dict[int, int] = {}
        self._digests: dict[int, bytes] = {}
        self._kept: dict[bytes, int] = {}
        self._idle: dict[int, None] = {}  # in order of their last use

    @property
    def num_free(self) -> int:
        """Number of pages that `take` can still allocate, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_usable(self) -> int:
        """Number of pages that sequences can own, all but the spare one."""
        return max(self.num_pages - 1, 0)

    @property
    def num_owned(self) -> int:
        """Number of pages that have an owner."""
        return len(self._owners)

    def take(self, count: int) -> list[int]:
        """Allocate and return `count` pages: free ones, the last freed first, then idle ones, the
        least recently used first.

        Raises `OnboardError` if there are fewer.
        """
        if count > self.num_free:
            raise OnboardError(f"{count} cache pages are needed and {self.num_free} are free")
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        self._owners.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, page: int) -> None:
        """Add an owner to an owned or idle page."""
        self._idle.pop(page, None)
        self._owners[page] = self._owners.get(page, 0) + 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Remove an owner from each page; of the pages that become idle the last ones are evicted
        first.
        """
        for page in reversed(pages):
            assert page in self._owners, "a page is freed twice"
            self._owners[page] -= 1
            if not self._owners[page]:
                del self._owners[page]
                if page in self._digests:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def keep(self, page: int, digest: bytes) -> None:
        """Publish an owned page under the digest of its content; the first page of equal content
        stays the one that `find` returns.
        """
        assert page in self._owners, "a page without an owner may change"
        if digest not in self._kept and page not in self._digests:
            self._kept[digest] = page
            self._digests[page] = digest

    def find(self, digest: bytes) -> int | None:
        """Return the page published under a digest, None if there is none."""
        return self._kept.get(digest)

    def is_idle(self, page: int) -> bool:
        """Whether a page has no owner but its content can still be found."""
        return page in self._idle

    def check(self) -> None:
        """Assert that every page is exactly one of spare, free, idle or owned."""
        pages = [0, *self._free, *self._idle, *self._owners] if self.num_pages else []
        assert sorted(pages) == list(range(self.num_pages)), "a page is lost"
        assert all(count > 0 for count in self._owners.values()), "a page is owned by nobody"
        assert {digest: page for page, digest in self._digests.items()} == self._kept, (
            "contents and pages differ"
        )
        assert self._digests.keys() <= self._idle.keys() | self._owners.keys(), (
            "a free page has a content"
        )

    def _evict(self) -> int:
        page = next(iter(self._idle))
        del self._idle[page]
        del self._kept[self._digests.pop(page)]
        self.num_evicted += 1
        return page


@dataclass
class PageGroup:
    """The pages behind one block table, shared by all caches with the same attention window."""

    allocator: PageAllocator
    window: int | None = None
    """Number of keys that a query sees, its own included; None: all."""

    def first_key(self, position: int) -> int:
        """Return the position of the first key that the query at `position` sees."""
        return 0 if self.window is None else max(position - self.window + 1, 0)
