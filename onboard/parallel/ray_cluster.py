"""Ray: the package, and the cluster that a command works on."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from onboard.errors import UsageError

LOCAL = "local"
"""The address of a cluster on this machine that a command starts for itself."""
_OBJECTS = 128 * 2**20
"""Bytes of a local cluster's object store: what goes through it has a few megabytes."""
_KNOCK = 10.0
"""Seconds that the head node may take to open a connection."""
_ADDRESS = "Give host:port of its head node, as `ray start --head` prints it"
_SHORT = "/tmp"
"""Sockets lie below Ray's folder, and their paths may not be longer than 107 bytes: no TMPDIR."""

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^",  # every line: what dies is in its record
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def import_ray(needing: str, address: str) -> Any:
    """Return the module for a cluster, told to be quiet: by default it reports its use, and prints
    to stdout.

    A local cluster listens to every address of the machine, and runs what it is told. So it obeys
    only who has its token, which its processes inherit; Ray reads that when it is imported. Raises
    `UsageError`, which begins with `needing`, where it is not installed.
    """
    os.environ.update(_QUIET)
    if address == LOCAL and "ray" not in sys.modules:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        import ray
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{needing} Ray, which is missing", hint="pip install 'onboard[ray]'"
        ) from error
    return ray


def cluster_address(address: str | None) -> str:
    """Return `address`, else the one that RAY_ADDRESS names, else that of a local cluster.

    Raises `UsageError` for what is no address, or where nobody listens: Ray itself would try for
    minutes.
    """
    address = address or os.environ.get("RAY_ADDRESS") or LOCAL
    if address in (LOCAL, "auto"):
        return address
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"{address!r} is no address of a Ray cluster", hint=_ADDRESS)
    try:
        socket.create_connection((host, int(port)), timeout=_KNOCK).close()
    except (OSError, OverflowError) as error:
        raise UsageError(f"there is no Ray cluster at {address}: {error}", hint=_ADDRESS) from error
    return address


@contextmanager
def cluster(ray: Any, address: str, cores: int) -> Iterator[str | None]:
    """Connect to a cluster; a local one is started with `cores`, and gone afterwards with the folder
    that it has, which is yielded.
    """
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    folder = tempfile.mkdtemp(prefix="ray-", dir=_SHORT) if address == LOCAL else None
    if folder:
        options |= {
            "num_cpus": cores,
            "include_dashboard": False,
            "object_store_memory": _OBJECTS,
            "_temp_dir": folder,
        }
    try:
        _connect(ray, address, options)
        yield folder
    finally:
        ray.shutdown()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _connect(ray: Any, address: str, options: dict[str, Any]) -> None:
    try:
        ray.init(address=address, **options)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise UsageError(
            f"no connection to a Ray cluster at {address}: {last_line(error)}", hint=_ADDRESS
        ) from error


def last_line(error: BaseException) -> str:
    """Return the last line of an error's text, else the name of its type."""
    lines = (line.strip() for line in reversed(str(error).splitlines()))
    return next((line for line in lines if line), type(error).__name__)
