"""All ranks of a run in one process, a thread each: for tests, where starting processes would take
longer than what is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from onboard.parallel.ranks import Ranks, as_rank

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
_LOOPBACK = "127.0.0.1"
_PATIENCE = timedelta(minutes=1)


def on_all_ranks(world_size: int, job: Callable[[Ranks], T]) -> list[T]:
    """Call a function on every rank of a group (gloo), each in a thread; return what each returns.

    Modes that torch keeps for each thread, as that of gradients, are the threads' own. The error of
    the first rank that failed is raised.
    """
    from torch._C._distributed_c10d import HashStore

    store = HashStore()

    def run(rank: int) -> T:
        ranks = Ranks(rank, world_size)
        with as_rank(ranks, _group(store, ranks)):
            return job(ranks)

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(run, range(world_size)))


def _group(store: Any, ranks: Ranks) -> ProcessGroup:
    from torch.distributed import ProcessGroupGloo

    gloo: Any = ProcessGroupGloo  # its stubs know a part of it
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_LOOPBACK)]
    options._timeout = _PATIENCE
    group: ProcessGroup = gloo(store, ranks.rank, ranks.world_size, options)
    return group
