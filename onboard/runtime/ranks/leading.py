"""The engine of a model that several ranks run: it schedules, chooses tokens, and has the others do
each step with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from onboard.cache.orders import Orders
from onboard.config import RuntimeConfig
from onboard.errors import OnboardError, UsageError
from onboard.parallel.launched_ranks import follow_launched, launched_ranks, lead_launched
from onboard.parallel.ranks import current_ranks, local_device, local_rank, why_no_peer_memory
from onboard.parallel.workers import Workers, start_workers
from onboard.runtime.build import build_engine, too_few
from onboard.runtime.engine import Engine
from onboard.runtime.ranks.devices_here import fewer_ranks
from onboard.runtime.ranks.division import Division
from onboard.runtime.ranks.following import Ready, follow, ready
from onboard.runtime.ranks.kept_division import find_division

_IMPORTS = ("onboard.runtime.ranks.following",)
_kept: Workers | None = None


class LedRanks:
    """The ranks that run one model with this process."""

    def __init__(self, division: Division, device: str) -> None:
        self.division = division
        self._workers = _workers(division.world_size, device)
        self._engine: Engine | None = None
        self.shares: list[Ready] = []
        """What each rank has, once there is an engine."""

    @property
    def workers(self) -> Workers:
        """The processes."""
        return self._workers

    def build(
        self,
        checkpoint: Path,
        runtime: RuntimeConfig,
        *,
        root: Path | None = None,
        model: str = "",
        strict: bool = False,
    ) -> Engine:
        """Build the model on all ranks; return this one's engine, which the others follow.

        Raises what `build_engine` raises, here or on another rank.
        """
        asked, ranks = runtime.world_size, self.division.world_size
        runtime = runtime.model_copy(update={"world_size": ranks})
        values = runtime.model_dump(exclude_unset=True)
        try:
            with self._workers.together():
                self._workers.begin(follow, checkpoint, values, root, model, strict)
                engine = build_engine(checkpoint, runtime, root=root, model=model, strict=strict)
                self.shares = [ready(engine), *self._workers.answers()]
            _check_alike(self.shares)
        except BaseException:
            self.close(orderly=False)
            raise
        engine.facts.extend(_facts(self.shares))
        if why := why_no_peer_memory():
            engine.facts.append(f"sums over ranks are the library's, also in decode steps: {why}")
        engine.facts.extend([too_few(ranks, asked)] if ranks < asked else [])
        engine.cache.orders = Orders(engine.cache.info, self._workers.send)
        engine.together = self._workers.together
        self._engine = engine
        return engine

    def close(self, *, orderly: bool = True) -> None:
        """Give the model up, and end the processes unless they are kept."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.together = _refused
        if self._workers is _kept and orderly and not _kept.is_lost:
            if engine is not None and engine.cache.orders is not None:
                engine.cache.orders.end()
                self._workers.answers()
            return
        self._workers.close(orderly=orderly)


def led_ranks(
    checkpoint: Path, runtime: RuntimeConfig, *, root: Path, model: str = "", must: bool
) -> LedRanks | None:
    """Return the ranks that a configuration asks for; None for one.

    Where there are fewer GPUs, and nobody has asked for ranks here and now, they are as many as the
    GPUs, or None, if the model fits these.

    Raises, before a process is started:
        UsageError: the ranks that must be are not possible, or cannot divide the model; there are
            fewer GPUs than configured, and it does not fit them.
    """
    if runtime.world_size > 1:
        _follow_the_launcher(runtime.world_size)
    found = division_for(checkpoint, runtime, root=root, model=model, must=must)
    return None if found is None else LedRanks(found, runtime.device)


def division_for(
    checkpoint: Path, runtime: RuntimeConfig, *, root: Path, model: str = "", must: bool
) -> Division | None:
    """Return how the ranks that a configuration asks for divide a model; None where `led_ranks`
    gives none. Raises what that does.
    """
    if runtime.world_size == 1:
        return None
    gpus = torch.cuda.device_count() if runtime.device != "cpu" else 0
    launched = launched_ranks() is not None  # perhaps on several hosts
    if not (must or launched) and gpus < runtime.world_size:
        return fewer_ranks(checkpoint, runtime, gpus, root=root, model=model)
    if runtime.mode == "transformers":
        raise UsageError(
            "mode transformers runs on one device", hint="Use mode graph or hf, or world_size 1"
        )
    if gpus and not launched:
        local_device("cuda", local_rank(0) + runtime.world_size - 1)
    return find_division(checkpoint, runtime, gpu=gpus > 0, root=root, model=model)


@contextmanager
def kept_workers(world_size: int, device: str = "cpu") -> Iterator[Workers]:
    """Start ranks for the models that are loaded in the block, one after the other."""
    global _kept
    workers = _started(world_size, device)
    _kept = workers
    try:
        yield workers
    finally:
        _kept = None
        workers.close()


@contextmanager
def _refused() -> Iterator[None]:
    raise OnboardError("the model was closed and runs no more", hint="Load it again")
    yield


def _workers(world_size: int, device: str) -> Workers:
    if _kept is not None and _kept.world_size == world_size and not _kept.is_lost:
        return _kept
    return _started(world_size, device)


def _started(world_size: int, device: str) -> Workers:
    if not current_ranks().is_alone:
        raise UsageError(
            "another model runs on several ranks, led by this process", hint="Close it first"
        )
    kind = "cpu" if device == "cpu" or not torch.cuda.is_available() else "cuda"
    if (launched := launched_ranks()) is not None:
        workers, address = lead_launched(launched)
        workers.meet(kind, address)
        return workers
    local_device(kind, local_rank(0) + world_size - 1)
    workers = start_workers(world_size, _IMPORTS)
    workers.meet(kind)
    return workers


def _follow_the_launcher(world_size: int) -> None:
    """Where a launcher has started the ranks and this process is not the first one, do as that says,
    and end with it.
    """
    ranks = launched_ranks()
    if ranks is None:
        return
    if ranks.world_size != world_size:
        raise UsageError(
            f"the launcher has started {ranks.world_size} processes for a world_size of {world_size}",
            hint=f"Start {world_size}, or set world_size to {ranks.world_size}",
        )
    if ranks.rank > 0:
        follow_launched(ranks, _IMPORTS)


def _check_alike(shares: Sequence[Ready]) -> None:
    """Raise `OnboardError` where ranks have settled on different limits."""
    first, *others = shares
    for each in others:
        for name, value in first.limits.items():
            if each.limits[name] != value:
                raise OnboardError(
                    f"rank {each.rank} has {name} {each.limits[name]} and rank 0 has {value}",
                    hint="Set max_batch_size, max_seq_len and the cache's max_tokens",
                )


def _facts(shares: Sequence[Ready]) -> list[str]:
    """Return what is to be known of other ranks and does not hold for the first."""
    first, *others = shares
    return [
        f"rank {each.rank}: {fact}"
        for each in others
        for fact in each.facts
        if fact not in first.facts
    ]
