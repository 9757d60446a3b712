"""Shapes and sizes of caches: pages of keys or values, and recurrent states."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class KVPagedResource:
    """The cache of one layer's keys or values: `[pages, num_kv_heads, keys a page, head_dim]`."""

    by_sequence: ClassVar[bool] = False

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int
    """Tokens in a page."""
    sliding_window: int | None = None
    """Number of keys that a query sees; None: all."""
    tokens_per_key: int = 1
    """Tokens that one key stands for; it lies in the page of the last of them."""

    @property
    def keys_per_page(self) -> int:
        """Largest number of keys in one page."""
        return (self.page_size - 1) // self.tokens_per_key + 1

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page of this cache."""
        return self.num_kv_heads * self.keys_per_page * self.head_dim * self.dtype.itemsize

    def num_bytes(self, num_pages: int) -> int:
        """Return the bytes of `num_pages` pages."""
        return num_pages * self.bytes_per_page

    def shape(self, num_pages: int) -> tuple[int, int, int, int]:
        """Return the tensor's shape for `num_pages` pages."""
        return num_pages, self.num_kv_heads, self.keys_per_page, self.head_dim

    def allocate(self, num_pages: int, device: torch.device) -> torch.Tensor:
        """Return a new cache of zeros: a NaN in uninitialised memory would pass through a masked
        key.
        """
        import torch  # imported here: sizes are needed where torch is not loaded

        return torch.zeros(self.shape(num_pages), dtype=self.dtype, device=device)


@dataclass(frozen=True)
class StateResource:
    """The cache of a state of fixed size for each sequence, as of a recurrent layer:
    `[slots, *state_shape]`.
    """

    by_sequence: ClassVar[bool] = True
    state_shape: tuple[int, ...]
    dtype: torch.dtype
    carries: bool = True
    """Whether the state depends on earlier tokens: a request that reuses a prefix then needs a
    snapshot of it.
    """

    @property
    def bytes_per_page(self) -> int:
        """Zero: a state does not grow with its sequence."""
        return 0

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one sequence's state."""
        return math.prod(self.state_shape) * self.dtype.itemsize

    def num_bytes(self, num_slots: int) -> int:
        """Return the bytes of `num_slots` states."""
        return num_slots * self.bytes_per_slot

    def allocate(self, num_slots: int, device: torch.device) -> torch.Tensor:
        """Return new states, all zeros."""
        import torch

        return torch.zeros((num_slots, *self.state_shape), dtype=self.dtype, device=device)


CacheResource = KVPagedResource | StateResource
