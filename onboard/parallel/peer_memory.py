"""Memory of each rank that the other ranks of its host write to from their kernels.

Made once, when the group is joined; kernels of `ops/collectives` exchange tensors through it without
a library's call, so that a sum of a decode step takes a few microseconds. Where it cannot be had, the
group's own collectives do, and a fact says why.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed

ABSENT = -(2**15)
"""What every 16 bits of the memory hold where nothing has been sent to yet: minus zero of the 16-bit
floats.
"""
BYTES_EACH = 8 * 2**20
"""Bytes that a rank has for what one other rank writes to it."""
BYTES_MORE = 112 * 2**20
"""Bytes that it has beside them, however many the ranks: 48 MiB for what they concatenate, 64 for
long sums.
"""
_ALIGNED = 16


def shared_bytes(world_size: int) -> int:
    """Return the bytes of each rank that the others write to."""
    return BYTES_EACH * world_size + BYTES_MORE


@dataclass(frozen=True)
class Region:
    """A part of the memory, for exchanges that are all cut into programs in the same way.

    A program of an exchange writes up to `size` bytes at its own place for each rank, in one half of
    the region and then in the other: a rank that is one exchange ahead overwrites nothing that is
    still read.
    """

    addresses: Tensor
    """[world size] int64: where the region begins in each rank's memory."""
    counts: Tensor
    """[programs] int32: how many exchanges each program has done."""
    size: int

    def elements(self, like: Tensor) -> int:
        """Return how many elements of a tensor's dtype one half of the region has for each rank."""
        return self.size * self.counts.numel() // like.element_size()


@dataclass
class PeerMemory:
    """What a rank shares with the others.

    Args:
        rank: which one.
        addresses: where each rank's memory begins, as this process sees it; `shared_bytes`, full
            of `ABSENT`.
        device: where the kernels run.
    """

    rank: int
    addresses: Sequence[int]
    device: torch.device
    kept: object = None
    """What keeps the memory alive."""
    gone: Tensor = field(init=False)
    """[1] int32: not zero once others have ended, for kernels that would wait for them forever."""
    _regions: dict[tuple[int, int], Region | None] = field(default_factory=dict)
    _used: int = 0

    def __post_init__(self) -> None:
        self.gone = torch.zeros(1, dtype=torch.int32, device=self.device)
        if self.device.type == "cuda":
            self._aside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._one = torch.ones(1, dtype=torch.int32).pin_memory()

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.addresses)

    def region(self, size: int, programs: int) -> Region | None:
        """Return the region of exchanges of up to `programs` programs of `size` bytes; all ranks
        ask for their regions in the same order. None where no room is left.
        """
        key = size, programs
        if key not in self._regions:
            self._regions[key] = self._new_region(size, programs)
        return self._regions[key]

    def give_up(self) -> None:
        """Let kernels that wait for another rank end, with results that nobody may use."""
        with torch.cuda.stream(self._aside):
            self.gone.copy_(self._one, non_blocking=True)

    def _new_region(self, size: int, programs: int) -> Region | None:
        whole = 2 * self.world_size * size * programs
        start, end = self._used, self._used + -(-whole // _ALIGNED) * _ALIGNED
        if end > shared_bytes(self.world_size):
            return None
        self._used = end
        places = [address + start for address in self.addresses]
        return Region(
            torch.tensor(places, dtype=torch.int64, device=self.device),
            torch.zeros(programs, dtype=torch.int32, device=self.device),
            size,
        )


def share_memory(device: torch.device) -> tuple[PeerMemory | None, str]:
    """Give the other ranks of the group memory of this one, and get theirs; all ranks call it.

    Returns:
        The memory, or None and why there is none.
    """
    if why := _why_not(device):
        return None, why
    # Multicast would be another way, which can put a host's GPUs out of service: never
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    from torch.distributed import _symmetric_memory as symmetric

    group = distributed.group.WORLD
    assert group is not None, "one rank shares with nobody"
    found: PeerMemory | None = None
    with suppress(RuntimeError, NotImplementedError):
        size = shared_bytes(group.size()) // torch.int16.itemsize
        own = symmetric.empty(size, dtype=torch.int16, device=device).fill_(ABSENT)
        torch.cuda.synchronize(device)
        handle = symmetric.rendezvous(own, group)
        found = PeerMemory(group.rank(), handle.buffer_ptrs, device, (own, handle))
    if not _all(found is not None, device):  # also: nobody writes before everybody's is cleared
        return None, "the GPUs do not share memory"
    return found, ""


def _why_not(device: torch.device) -> str:
    """Return why the ranks cannot share memory, which is the same on all of them; or nothing."""
    world = distributed.get_world_size()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    peers = [torch.device("cuda", each) for each in range(torch.cuda.device_count())]
    reached = here == world and all(
        peer == device or torch.cuda.can_device_access_peer(device, peer) for peer in peers[:world]
    )
    if _all(reached, device):
        return ""
    return "the ranks' GPUs are on several hosts" if here != world else "a GPU cannot reach another"


def _all(what: bool, device: torch.device) -> bool:
    box = torch.tensor(int(what), device=device)
    distributed.all_reduce(box, distributed.ReduceOp.MIN)
    return bool(box)
