"""The other ranks, as the first one sees them: started, given jobs, watched and ended."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from onboard.errors import ConsentRequiredError, OnboardError, UsageError
from onboard.parallel.links import Link, start_process
from onboard.parallel.rank_process import Failure, Job, identity
from onboard.parallel.ranks import Ranks, abort_group, join_group, leave_group

_HELLO = 120.0
"""Seconds that a process may take to start."""
_VERDICT = 2.0
"""Seconds after which what the ranks have told is all that there is to know of a failure."""
_STUCK = 5.0
"""Seconds that this process may still wait for a rank that has ended; nothing can interrupt it where
it waits for a device."""
_END = 3.0


class Workers:
    """Ranks 1 and on, each a process that does one job after another, all of them the same.

    A rank that ends, or fails, ends all of them: `together` then raises why.
    """

    def __init__(self, links: Sequence[Link], folder: tempfile.TemporaryDirectory[str]) -> None:
        self.links = list(links)
        self._folder = folder
        self._said: dict[int, SimpleQueue[Any]] = {link.rank: SimpleQueue() for link in links}
        self._failures: dict[int, Failure] = {}
        self._failed = threading.Event()
        self._is_closed = False
        self._busy = 0.0
        """When this process began what it does together with the others; 0: it does nothing."""
        self._watch = threading.Thread(target=self._watched, name="onboard-ranks", daemon=True)
        self.when_failed: list[Callable[[], None]] = []
        """Called from another thread when ranks have failed."""
        self.keep: list[object] = []
        """What ends with the ranks."""

    @property
    def world_size(self) -> int:
        """The number of ranks, this one included."""
        return len(self.links) + 1

    @property
    def is_lost(self) -> bool:
        """Whether the ranks can do nothing any more."""
        return self._is_closed or self._failed.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether a rank has told of a failure, or has ended; the others may not know it yet."""
        return bool(self._failures)

    @property
    def failure(self) -> OnboardError | None:
        """Why the ranks have failed; None: they have not."""
        return self._reason() if self._failed.is_set() else None

    def meet(self, device: str, address: str | None = None, *, led: bool = True) -> None:
        """Let all ranks, this one too, join one group, once their libraries are known to be the
        same.

        Raises:
            OnboardError: a process ended, or did not start.
            UsageError: versions differ, or there are fewer GPUs than ranks.
        """
        address = address or (Path(self._folder.name) / "meet").as_uri()
        own = identity()
        for link, theirs in zip(self.links, self._hellos(), strict=True):
            _check_same(link.rank, own, theirs)
        self._watch.start()
        with self.together():
            for link in self.links:
                link.connection.send((Ranks(link.rank, self.world_size, led), address, device))
            join_group(Ranks(0, self.world_size, led), address, device)
            self.answers()

    def begin(self, job: Job, *args: Any) -> None:
        """Give every rank a job; `answers` waits for what it says and returns."""
        with self._sending():
            for link in self.links:
                link.connection.send((job, args))

    def send(self, order: bytes) -> None:
        """Send all ranks bytes, for which their job waits."""
        with self._sending():
            for link in self.links:
                link.connection.send_bytes(order)

    def answers(self) -> list[Any]:
        """Wait for the next answer of every rank, and return them in order."""
        return [self._answer(link.rank) for link in self.links]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Do what all ranks do at once: whatever else fails here is said by the reason that the
        ranks have, and they are of no use then.
        """
        self._check()
        before, self._busy = self._busy, self._busy or time.monotonic()
        try:
            yield
            self._check()  # what an aborted group has computed is nothing
        except OnboardError:
            if self._failed.is_set():
                raise self._reason() from None
            raise
        except Exception as error:
            found = self._failed.wait(_VERDICT)
            self.close(orderly=False)
            raise (self._reason() if found else error) from error
        except BaseException:  # interrupted: the ranks are in the middle of something
            self.close(orderly=False)
            raise
        finally:
            self._busy = before

    def close(self, *, orderly: bool = True) -> None:
        """End all ranks; idle ones end by themselves."""
        if self._is_closed:
            return
        self._is_closed = True
        orderly = orderly and not self._failed.is_set()
        for link in () if orderly else self.links:
            link.kill()
        until = time.monotonic() + _END
        for link in self.links:
            link.end(until - time.monotonic())
        with suppress(Exception):  # the group of ranks that are gone
            leave_group()
        self._folder.cleanup()

    def _hellos(self) -> list[dict[str, str]]:
        """Wait for every rank's first word."""
        until = time.monotonic() + _HELLO
        try:
            return [self._hello(link, until) for link in self.links]
        except BaseException:
            self.close(orderly=False)
            raise

    def _hello(self, link: Link, until: float) -> dict[str, str]:
        if not link.connection.poll(until - time.monotonic()):
            raise OnboardError(f"rank {link.rank} did not start within {_HELLO:.0f} s")
        try:
            word, told = link.connection.recv()
        except EOFError:
            how = link.how_it_ended()
            raise OnboardError(f"rank {link.rank} did not start: {how}") from None
        if word == "failed":
            raise _error(link.rank, told)
        return dict(told)

    def _answer(self, rank: int) -> Any:
        while True:
            try:
                return self._said[rank].get(timeout=0.2)
            except Empty:
                self._check()

    def _check(self) -> None:
        if self._failed.is_set():
            raise self._reason()
        if self._is_closed:
            raise OnboardError("the ranks of this model have ended", hint="Load it again")

    @contextmanager
    def _sending(self) -> Iterator[None]:
        self._check()
        try:
            yield
        except OSError as error:
            self._failed.wait(_VERDICT)
            self._check()
            raise OnboardError(f"a rank cannot be reached: {error}") from error

    def _reason(self) -> OnboardError:
        """Return what the user is told: what a rank itself has found, else how one ended."""
        self._failed.wait(_VERDICT)
        rank, failure = min(self._failures.items(), key=lambda each: each[1].may_follow)
        return _error(rank, failure)

    def _watched(self) -> None:
        """Take what ranks tell, until one fails."""
        open_links = {link.connection: link for link in self.links}
        until: float | None = None
        while open_links and not self._is_closed:
            left = 0.2 if until is None else min(0.2, until - time.monotonic())
            if until is not None and (left <= 0 or not self._may_follow()):
                break
            try:
                ready = connection.wait(list(open_links), max(left, 0.0))
            except OSError:  # closed meanwhile
                break
            for each in ready:
                link = open_links[each]  # type: ignore[index]
                if not self._take(link):
                    del open_links[link.connection]
            if self._failures and until is None:
                until = time.monotonic() + _VERDICT / 2
        if self._failures and not self._is_closed:
            self._give_up()

    def _may_follow(self) -> bool:
        return all(each.may_follow for each in self._failures.values())

    def _take(self, link: Link) -> bool:
        """Take a message; return False after a rank's last."""
        try:
            word, told = link.connection.recv()
        except (EOFError, OSError):
            if not self._is_closed:
                self._failures.setdefault(link.rank, Failure(link.how_it_ended()))
            return False
        except Exception as error:  # of another version, say
            self._failures[link.rank] = Failure(f"what it says cannot be read: {error}")
            return False
        if word == "failed":
            self._failures[link.rank] = told
            return False
        self._said[link.rank].put(told)
        return True

    def _give_up(self) -> None:
        for link in self.links:
            link.kill()
        self._failed.set()
        with suppress(Exception):  # the group may be half made, or gone
            abort_group()
        for each in self.when_failed:
            each()
        until = time.monotonic() + _STUCK
        while self._busy and time.monotonic() < until:
            time.sleep(0.1)
        if self._busy and not self._is_closed:
            error = self._reason()
            print(f"onboard: {error}", file=sys.stderr, flush=True)
            os._exit(error.exit_code)


def start_workers(world_size: int, imports: Sequence[str] = ()) -> Workers:
    """Start the processes of ranks 1 and on; `meet` waits for them."""
    folder = tempfile.TemporaryDirectory(prefix="onboard-ranks-")
    links = [start_process(rank, world_size, imports) for rank in range(1, world_size)]
    return Workers(links, folder)


def _check_same(rank: int, own: dict[str, str], theirs: dict[str, str]) -> None:
    for name, version in own.items():
        if theirs.get(name) != version:
            raise UsageError(
                f"rank {rank} has {name} {theirs.get(name)} and rank 0 has {version}",
                hint="Install the same on all",
            )


def _error(rank: int, failure: Failure) -> OnboardError:
    kinds = {kind.exit_code: kind for kind in (UsageError, ConsentRequiredError)}
    kind = kinds.get(failure.exit_code, OnboardError)
    return kind(f"rank {rank}: {failure.message}", hint=failure.hint)
