"""Several processes that run one model together: which of them this one is, and their group.

A process a rank: each joins the group, builds the model with `RuntimeConfig.world_size` set to the
group's size, and gets its own share of the weights. `workers.py` has the processes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from onboard.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from onboard.parallel.in_one_process import GroupOfThreads
    from onboard.parallel.peer_memory import PeerMemory

Graph = TypeVar("Graph")
_PATIENCE = timedelta(minutes=10)
"""How long a rank waits for the others: ranks load weights of different sizes."""


@dataclass(frozen=True)
class Ranks:
    """A process among those that run a model together."""

    rank: int = 0
    world_size: int = 1
    led: bool = False
    """Whether the first rank schedules and chooses tokens for all, and the others do as they are
    told.
    """
    ahead: bool = False
    """Whether a step may be launched before a host knows the tokens of the one before."""

    @property
    def is_alone(self) -> bool:
        """Whether there is one process, which has everything."""
        return self.world_size == 1

    @property
    def follows(self) -> bool:
        """Whether another process schedules for this one."""
        return self.led and self.rank > 0

    @property
    def told_tokens(self) -> bool:
        """Whether the devices give one another the tokens that the first one has chosen."""
        return self.led and self.ahead and not self.is_alone


ALONE = Ranks()
LOCAL_RANK = "LOCAL_RANK"
"""The environment variable in which torchrun and others say which of its host's processes one is."""
_OF_THREAD = threading.local()
"""The rank and the group of a thread that has its own."""
_joined = ALONE
_memory: PeerMemory | None = None
_no_memory = ""
_graphs: WeakSet[Any] = WeakSet()
_ENDING = 10.0
"""Seconds that the group's end may take; what is left then ends with the process."""


def join_group(
    ranks: Ranks, address: str, device: str = "cpu", patience: timedelta = _PATIENCE
) -> None:
    """Join the group of all ranks; return when all have. On GPUs each takes that of its rank.

    Args:
        ranks: this process, and how many there are.
        address: where the ranks meet, as torch.distributed takes it: `tcp://HOST:PORT` of rank 0,
            `file:///PATH` on one host, or `env://`.
        device: "cuda" (NCCL) or "cpu" (gloo).
        patience: how long a collective waits for the others.

    Raises:
        UsageError: there are fewer GPUs on this host than ranks.
    """
    import torch
    from torch import distributed

    global _joined, _memory, _no_memory
    place = local_device(device, local_rank(ranks.rank))
    if place.type == "cuda":
        torch.cuda.set_device(place)
    distributed.init_process_group(
        "nccl" if place.type == "cuda" else "gloo",
        init_method=address,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=patience,
    )
    _joined = ranks
    if place.type == "cuda" and not ranks.is_alone:
        from onboard.parallel.peer_memory import share_memory

        _memory, _no_memory = share_memory(place)


def leave_group() -> None:
    """Leave the group, if this process is in one; graphs that were captured in it run no more."""
    from torch import distributed

    global _joined, _memory
    if _has_group():
        if _memory is not None:
            _memory.give_up()
        for graph in list(_graphs):
            graph.reset()  # NCCL ends no group of which a graph still has kernels
        ending = threading.Thread(target=distributed.destroy_process_group, daemon=True)
        ending.start()
        ending.join(_ENDING)
    _joined, _memory = ALONE, None


def captured_in_group(graph: Graph) -> Graph:
    """Let a CUDA graph end with the group, whose kernels it may have; return it."""
    _graphs.add(graph)
    return graph


def abort_group() -> None:
    """End what this process waits for in its group, from another thread: other ranks are gone."""
    from torch import distributed

    if _memory is not None:
        _memory.give_up()
    if _has_group() and distributed.get_backend() == "nccl" and distributed.group.WORLD is not None:
        distributed.group.WORLD.abort()


def peer_memory() -> PeerMemory | None:
    """Return the memory that the GPUs of all ranks share, if they do."""
    return _memory


def why_no_peer_memory() -> str:
    """Return why the GPUs of the ranks share none; nothing where they do, and on the CPU."""
    return _no_memory


def current_ranks() -> Ranks:
    """Return this process among those of its group; alone without one."""
    from torch import distributed

    if (own := getattr(_OF_THREAD, "ranks", None)) is not None:
        return own  # type: ignore[no-any-return]
    if not _has_group():
        return ALONE
    # A group that somebody else has made is not led
    return replace(_joined, rank=distributed.get_rank(), world_size=distributed.get_world_size())


def current_group() -> ProcessGroup | GroupOfThreads:
    """Return the group of the current ranks, of which there are several."""
    from torch import distributed

    group = getattr(_OF_THREAD, "group", None) or distributed.group.WORLD
    assert group is not None, "one rank has no group"
    return group


@contextmanager
def as_rank(ranks: Ranks, group: ProcessGroup | GroupOfThreads) -> Iterator[None]:
    """Let the current thread be a rank of a group of its own."""
    _OF_THREAD.ranks, _OF_THREAD.group = ranks, group
    try:
        yield
    finally:
        del _OF_THREAD.ranks, _OF_THREAD.group


def least(value: int, ranks: Ranks) -> int:
    """Return the smallest of what the ranks have; all call it alike."""
    import torch
    from torch import distributed

    if ranks.is_alone:
        return value
    on_gpu = distributed.get_backend() == "nccl"
    box = torch.tensor(value, device=torch.cuda.current_device() if on_gpu else "cpu")
    distributed.all_reduce(box, distributed.ReduceOp.MIN)
    return int(box)


def local_rank(rank: int) -> int:
    """Return the number of this process among those of its host: the rank itself, unless whoever
    started it says otherwise.
    """
    return int(os.environ.get(LOCAL_RANK, rank))


def local_device(device: str, rank: int) -> torch.device:
    """Return the device of a rank on this host: GPUs are given out in the order of ranks.

    Raises:
        UsageError: there is no GPU for it.
    """
    import torch

    if device != "cuda":
        return torch.device("cpu")
    if rank >= (found := torch.cuda.device_count()):
        raise UsageError(
            f"rank {rank} has no GPU: this host has {found}", hint=f"Set world_size to {found}"
        )
    return torch.device("cuda", rank)


def _has_group() -> bool:
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized()
