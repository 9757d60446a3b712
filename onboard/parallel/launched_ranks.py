"""Ranks that a launcher has started, torchrun or another one with its environment, perhaps on several
hosts: the first one waits for the others, which do as it says.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, NoReturn

from onboard.errors import OnboardError, UsageError
from onboard.parallel.links import Link
from onboard.parallel.rank_process import serve
from onboard.parallel.ranks import Ranks
from onboard.parallel.workers import Workers

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells each of its processes."""
_PLACE = "onboard/first-rank"
"""The launcher's key for where the first rank waits, and for the word by which it knows the others."""
_PATIENCE = 120.0
"""Seconds that the processes have to start."""
_met = False


def launched_ranks() -> Ranks | None:
    """Return this process among several that a launcher has started; None: there is no launcher.

    Raises:
        UsageError: the environment is none of a launcher.
    """
    found = [os.environ.get(name) for name in _NAMES]
    if None in found:
        return None
    try:
        ranks = Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    except ValueError as error:
        raise UsageError(f"RANK and WORLD_SIZE are no numbers: {error}") from error
    return None if ranks.is_alone else ranks


def lead_launched(ranks: Ranks) -> tuple[Workers, str]:
    """Wait for all other ranks; return them, and the address at which all may meet.

    Raises:
        OnboardError: a rank did not come, or the ranks have ended already.
    """
    global _met
    if _met:
        raise OnboardError(
            "the launcher's ranks ended with the model that they ran",
            hint="Start all of them again",
        )
    _met = True
    host, key = os.environ["MASTER_ADDR"], secrets.token_bytes(32)
    with _server(host) as server:
        store = _store(ranks)
        store.set(_PLACE, json.dumps([host, server.getsockname()[1], key.hex()]))
        links = _accepted(server, key, ranks.world_size)
    workers = Workers(links, tempfile.TemporaryDirectory(prefix="onboard-ranks-"))
    workers.keep.append(store)
    _outlive_the_launcher(workers)
    return workers, f"tcp://{host}:{_free_port()}"


def follow_launched(ranks: Ranks, imports: Sequence[str] = ()) -> NoReturn:
    """Do what the first rank says until it ends, and end this process with it."""
    host, port, key = json.loads(_store(ranks).get(_PLACE))
    connection = Connection(socket.create_connection((host, port), _PATIENCE).detach())
    os.set_blocking(connection.fileno(), True)
    answer_challenge(connection, bytes.fromhex(key))
    deliver_challenge(connection, bytes.fromhex(key))
    connection.send(ranks.rank)

    def libraries() -> None:
        for name in imports:
            importlib.import_module(name)

    serve(connection, libraries)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def _server(host: str) -> socket.socket:
    """Wait at the address alone that the launcher has named, if it is one of this machine's own:
    behind a router it is not.
    """
    try:
        return socket.create_server((host, 0))
    except OSError:
        return socket.create_server(("", 0))


def _store(ranks: Ranks) -> Store:
    """Return what all processes of a launcher can write to."""
    from torch.distributed.rendezvous import rendezvous

    patience = timedelta(seconds=_PATIENCE)
    address = f"env://?rank={ranks.rank}&world_size={ranks.world_size}"
    store, _, _ = next(rendezvous(address, timeout=patience))
    return store  # type: ignore[no-any-return]


def _accepted(server: socket.socket, key: bytes, world_size: int) -> list[Link]:
    """Return links to all other ranks, in order, once they have come and known the word."""
    found: dict[int, Link] = {}
    until = time.monotonic() + _PATIENCE
    while len(found) < world_size - 1:
        server.settimeout(max(until - time.monotonic(), 0.01))
        try:
            connection = Connection(server.accept()[0].detach())
        except TimeoutError:
            missing = sorted({*range(1, world_size)} - {*found})
            who = ", ".join(map(str, missing))
            raise OnboardError(f"rank {who} did not come within {_PATIENCE:.0f} s") from None
        with suppress(AuthenticationError, EOFError, OSError):  # somebody else
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            rank = int(connection.recv())
            found[rank] = Link(rank, connection)
    return [found[rank] for rank in sorted(found)]


def _outlive_the_launcher(workers: Workers) -> None:
    """Say why a rank has ended before this process does: the launcher ends it, too, when one has."""

    def end(number: int, _: object) -> None:
        if not workers.has_failed:
            sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
        return port
