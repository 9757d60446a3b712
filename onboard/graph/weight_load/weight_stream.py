"""Bytes of files to their final place on a device: read by several threads, through pinned buffers,
copied beside that.

One thread cannot read as fast as a GPU takes data, and a copy from memory that is not pinned waits
for itself. So each thread has two pinned buffers and a stream: while one buffer is copied to the
device, the file is read into the other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onboard.errors import OnboardError

THREADS = 8
CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class Load:
    """The bytes of `file` from `offset` on are the contents of `target`, which is contiguous."""

    file: Path
    offset: int
    target: Tensor


def stream(
    loads: Sequence[Load], *, threads: int = THREADS, chunk_bytes: int = CHUNK_BYTES
) -> None:
    """Fill every target; all of them lie on one device. Raises `OnboardError` when a file ends too
    early.
    """
    if not loads:
        return
    device = loads[0].target.device
    if device.type == "cuda":
        # What is allocated may still be written to by work of the main stream
        torch.cuda.synchronize(device)
    pieces, lock = _pieces(loads, chunk_bytes), threading.Lock()
    with ExitStack() as stack:
        files = {
            file: os.open(file, os.O_RDONLY) for file in dict.fromkeys(load.file for load in loads)
        }
        for descriptor in files.values():
            stack.callback(os.close, descriptor)
        count = max(1, min(threads, os.cpu_count() or 1))
        pool = stack.enter_context(ThreadPoolExecutor(count))
        for worker in [
            pool.submit(_work, pieces, lock, files, device, chunk_bytes) for _ in range(count)
        ]:
            worker.result()


def _pieces(loads: Iterable[Load], chunk_bytes: int) -> Iterator[Load]:
    for load in loads:
        data = load.target.reshape(-1).view(torch.uint8)
        for start in range(0, len(data), chunk_bytes):
            yield Load(load.file, load.offset + start, data[start : start + chunk_bytes])


@torch.inference_mode()
def _work(
    pieces: Iterator[Load],
    lock: threading.Lock,
    files: dict[Path, int],
    device: torch.device,
    chunk_bytes: int,
) -> None:
    """Take pieces until none are left."""
    buffers = [_Buffer(chunk_bytes, device) for _ in range(2)]
    on_device = device.type == "cuda"
    own: Any = torch.cuda.Stream(device) if on_device else None  # type: ignore[no-untyped-call]
    with torch.cuda.stream(own) if on_device else nullcontext():
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                break
            buffers[0].fill(piece, files[piece.file])
            buffers.reverse()
    if on_device:
        own.synchronize()


class _Buffer:
    """Host memory for one piece, and when it may be written again."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        on_device = device.type == "cuda"
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_device)
        self.copied = torch.cuda.Event() if on_device else None  # type: ignore[no-untyped-call]

    def fill(self, piece: Load, descriptor: int) -> None:
        """Read a piece and start its copy."""
        if self.copied is not None:
            self.copied.synchronize()
        data = self.memory[: len(piece.target)]
        array: Any = data.numpy()
        _read(descriptor, memoryview(array), piece)
        piece.target.copy_(data, non_blocking=True)
        if self.copied is not None:
            self.copied.record()


def _read(descriptor: int, view: memoryview, piece: Load) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], piece.offset + done)
        if count == 0:
            raise OnboardError(
                f"{piece.file.name} ended while it was read", hint="Fetch the checkpoint again"
            )
        done += count
