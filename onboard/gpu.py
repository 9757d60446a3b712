"""This machine: its GPUs' memory through NVML, the system's otherwise, its processor, and what is
installed.
"""

from __future__ import annotations

import os
import platform
import runpy
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_MEMINFO = Path("/proc/meminfo")
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Gpu:
    """One GPU; memory in bytes."""

    name: str
    total: int
    free: int


@dataclass(frozen=True)
class Memory:
    """What a model can be put into: the GPU that a run uses, or without one the system's memory; in
    bytes.
    """

    total: int
    free: int
    gpus: list[Gpu] = field(default_factory=list)
    """All that there are, the one that a run uses first."""

    def __str__(self) -> str:
        size = f"{gigabytes(self.total)} GB"
        if not self.gpus:
            return f"{size} of system memory"
        return (
            f"{size} on one GPU"
            if len(self.gpus) == 1
            else f"{size} on the one of {len(self.gpus)} GPUs that a run uses"
        )


FREE_SHARE = 0.95
"""A GPU of which this much memory is free is one that nobody uses."""


def list_gpus() -> list[Gpu]:
    """Return the NVIDIA GPUs of this machine in the order of `CUDA_VISIBLE_DEVICES`; none without a
    driver.

    That variable hides all when it is empty; numbers in it choose.
    """
    return list(_visible_gpus().values())


def free_gpus() -> list[int]:
    """Return the numbers, as the driver counts, of the visible GPUs that nobody uses."""
    return [index for index, gpu in _visible_gpus().items() if gpu.free >= FREE_SHARE * gpu.total]


def _visible_gpus() -> dict[int, Gpu]:
    import pynvml

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in {"", "-1"}:
        return {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        count = pynvml.nvmlDeviceGetCount()
        chosen = [
            int(each) for each in (visible or "").split(",") if each.strip().isdigit()
        ] or range(count)
        return {
            each: _gpu(pynvml.nvmlDeviceGetHandleByIndex(each)) for each in chosen if each < count
        }
    finally:
        pynvml.nvmlShutdown()


def _gpu(handle: object) -> Gpu:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(str(pynvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.free))


def system_memory() -> Memory:
    """Return the system's memory, as POSIX `sysconf` counts it, or what a container's limit leaves
    of it.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    limit = _container_limit() or total
    return Memory(min(total, limit), min(free, limit))


def available_memory() -> int:
    """Return the bytes of the system's memory that a process can take, those in which files are
    only kept included.
    """
    lines = _MEMINFO.read_text(encoding="ascii").splitlines() if _MEMINFO.exists() else []
    found = next(
        (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None
    )
    memory = system_memory()
    return memory.free if found is None else min(found, memory.total)


def _container_limit() -> int | None:
    """Return the memory limit of this process's control group (version 2); None without one."""
    try:
        text = _CGROUP_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def device_memory(device: str) -> Memory:
    """Return the memory that `device` ("auto", "cpu", "cuda") stands for; "auto" means a GPU when
    there is one.
    """
    gpus = [] if device == "cpu" else list_gpus()
    if not gpus:
        return system_memory()
    return Memory(gpus[0].total, gpus[0].free, gpus)


def gib(size: float) -> str:
    """Return a size in GiB or, when small, in MiB, with three digits."""
    value, unit = (size / 2**30, "GiB") if abs(size) >= 2**30 else (size / 2**20, "MiB")
    return f"{value:,.{max(0, 2 - len(str(int(abs(value)))) + 1)}f} {unit}"


def gigabytes(size: int) -> str:
    """Return a size in GB (10^9 bytes) with two significant digits."""
    value = size / 1e9
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def processor() -> str:
    """Return the processor's name as the system tells it, else its architecture."""
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def version(package: str) -> str:
    """Return the version of an installed package, that of torch with its build: "2.11.0+cu130".

    Raises:
        PackageNotFoundError: of `importlib.metadata`; it is not installed.
    """
    found = metadata.version(package)
    return _torch() if package == "torch" else found


@cache
def _torch() -> str:
    """Return what torch says itself: wheels of the same release for CPUs and GPUs may have one
    metadata.
    """
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return str(runpy.run_path(str(Path(spec.origin).with_name("version.py")))["__version__"])
