"""What this machine can do at most, measured: bytes read a second, operations of a matrix product a
second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch

from onboard.gpu import processor
from onboard.ops import has_triton

_READ_BYTES = {"cuda": 4 * 2**30, "cpu": 2**28}
_MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
_REPEATS = 7
_CALLS = {"cuda": 10, "cpu": 1}


@dataclass(frozen=True)
class Ceilings:
    """The two rates that bound every step."""

    device: str
    """Its name."""
    read_bandwidth: float
    """Bytes a second of the quickest large read."""
    matmul_rate: float
    """Operations a second (a multiplication and an addition are two) of a large matrix product in
    the run's dtype.
    """

    def seconds(self, num_bytes: float, operations: float) -> float:
        """Return the least time for work that reads and computes this much: the larger of the two
        times.
        """
        return max(num_bytes / self.read_bandwidth, operations / self.matmul_rate)


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure both rates of a device in a second or two."""
    return Ceilings(device_name(device), _read_bandwidth(device), _matmul_rate(device, dtype))


def device_name(device: torch.device) -> str:
    """Return what a device is called."""
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{processor()}, {_threads()}"
    )


def _threads() -> str:
    count = torch.get_num_threads()
    return f"{count} {'thread' if count == 1 else 'threads'}"


def synchronized(work: Callable[[], object], device: torch.device) -> float:
    """Return the wall time of one call, a GPU's work included."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _read_bandwidth(device: torch.device) -> float:
    """Return the best rate of several reductions: each reads all of it and writes next to
    nothing.
    """
    size = _READ_BYTES[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 2)
    data = torch.ones(size // 4, dtype=torch.float32, device=device)
    rows = data[: data.numel() // 4096 * 4096].view(-1, 4096)
    weights = torch.ones(4096, device=device)
    reads: tuple[Callable[[], object], ...] = (
        lambda: data.sum(),
        lambda: data.amax(),
        lambda: torch.mv(rows, weights),
    )
    if device.type == "cuda" and has_triton():
        kernels = import_module("onboard.ops.triton.read")
        reads += tuple(partial(kernels.read_all, data, block) for block in kernels.BLOCKS)
    return rows.nbytes / min(_quickest(read, device) for read in reads)


def _quickest(work: Callable[[], object], device: torch.device) -> float:
    work()
    return min(_each(work, device) for _ in range(_REPEATS))


def _each(work: Callable[[], object], device: torch.device) -> float:
    """Return the time of one of several calls in a row: on a GPU the launch of one is hidden by the
    one before.
    """
    calls = _CALLS[device.type]
    return synchronized(lambda: [work() for _ in range(calls)], device) / calls


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the median rate of a square product of random numbers (zeros run faster)."""
    size = _MATMUL_SIZE[device.type]
    left, right = (
        torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2)
    )
    for _ in range(2):
        torch.mm(left, right)
    return (
        2
        * size**3
        / statistics.median(_each(lambda: torch.mm(left, right), device) for _ in range(_REPEATS))
    )
