"""All ranks of a run in one process, a thread each: for tests, where starting processes would take
longer than what is tested.

They exchange tensors by what they share, not by sockets: tests of a repository's own code run where
there are none.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Barrier, BrokenBarrierError
from typing import TYPE_CHECKING, TypeVar

from onboard.parallel.ranks import Ranks, as_rank

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
_PATIENCE = 60.0
"""Seconds that a rank waits for the others."""


def on_all_ranks(world_size: int, job: Callable[[Ranks], T]) -> list[T]:
    """Call a function on every rank of a group, each in a thread; return what each returns.

    Modes that torch keeps for each thread, as that of gradients, are the threads' own. The error of
    the first rank that failed is raised, and no rank waits for one that has.
    """
    import torch

    # In a forked process the first thread that computes makes torch's pool of threads anew, and a
    # second one at that moment finds none: it is made before there are any.
    torch.set_num_threads(torch.get_num_threads())
    meeting = Barrier(world_size)
    given: list[Tensor | None] = [None] * world_size

    def run(rank: int) -> T:
        try:
            with as_rank(Ranks(rank, world_size), GroupOfThreads(rank, meeting, given)):
                return job(Ranks(rank, world_size))
        except Exception:
            meeting.abort()
            raise

    with ThreadPoolExecutor(world_size) as threads:
        results: list[Future[T]] = [threads.submit(run, rank) for rank in range(world_size)]
        wait(results)
    errors = [error for result in results if (error := result.exception()) is not None]
    for error in sorted(errors, key=lambda item: isinstance(item, BrokenBarrierError)):
        raise error
    return [result.result() for result in results]


class GroupOfThreads:
    """A group as `torch.distributed` has it, as far as the ops use it, for one of its threads.

    Args:
        rank: which one.
        meeting: where all of them meet.
        given: what each has brought to the collective that runs.
    """

    def __init__(self, rank: int, meeting: Barrier, given: list[Tensor | None]) -> None:
        self._rank, self._meeting, self._given = rank, meeting, given

    def allreduce(self, tensors: list[Tensor]) -> GroupOfThreads:
        """Add to the only tensor those of all other ranks."""
        (total,) = tensors
        first, *others = self._exchanged(total)
        total.copy_(sum(others, first))
        return self

    def allgather(self, parts: list[list[Tensor]], tensors: list[Tensor]) -> GroupOfThreads:
        """Fill the only list with every rank's tensor."""
        (places,), (own,) = parts, tensors
        for place, tensor in zip(places, self._exchanged(own), strict=True):
            place.copy_(tensor)
        return self

    def wait(self) -> None:
        """Return: every collective is done when it returns."""

    def _exchanged(self, own: Tensor) -> list[Tensor]:
        """Return copies of what all ranks brought."""
        self._given[self._rank] = own
        self._meeting.wait(_PATIENCE)
        found = [tensor.clone() for tensor in self._given if tensor is not None]
        self._meeting.wait(_PATIENCE)
        return found
