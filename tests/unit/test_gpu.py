from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from onboard import gpu


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """A driver with the GPUs of the returned list."""
    cards = [
        SimpleNamespace(name=f"H{index}", total=80 * 10**9, free=(70 - index) * 10**9)
        for index in range(2)
    ]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(cards))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", cards.__getitem__)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda card: card.name)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda card: card)
    return cards


def test_the_one_gpu_that_a_run_uses(
    driver: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = gpu.device_memory("auto")
    assert (memory.total, memory.free, len(memory.gpus)) == (80 * 10**9, 70 * 10**9, 2)
    assert str(memory) == "80 GB on the one of 2 GPUs that a run uses"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [card.name for card in gpu.list_gpus()] == ["H1"]
    assert gpu.device_memory("cuda").free == 69 * 10**9
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    del driver[1]
    assert str(gpu.device_memory("cuda")) == "80 GB on one GPU"


def test_the_cpu_has_the_systems_memory(
    driver: list[SimpleNamespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert driver
    monkeypatch.setattr(gpu, "_CGROUP_LIMIT", tmp_path / "none")
    memory = gpu.device_memory("cpu")
    with open("/proc/meminfo") as file:
        kilobytes = int(file.readline().split()[1])
    assert memory.total == pytest.approx(kilobytes * 1024, rel=0.01)
    assert 0 < memory.free <= memory.total
    assert not memory.gpus
    assert str(memory).endswith(" GB of system memory")


@pytest.mark.parametrize(
    ("text", "limit"), [("123456\n", 123456), ("max\n", None), (f"{2**62}\n", None)]
)
def test_a_containers_limit(
    text: str, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(text)
    monkeypatch.setattr(gpu, "_CGROUP_LIMIT", tmp_path / "memory.max")
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = gpu.system_memory()
    assert memory.total == (limit or installed)
    assert memory.free <= memory.total


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus(
    driver: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    assert driver
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", hidden)
    assert gpu.list_gpus() == []


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert gpu.list_gpus() == []
    assert gpu.device_memory("cuda").gpus == []


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (123_400_000_000, "123"),
        (16_060_000_000, "16"),
        (1_234_000_000, "1.2"),
        (5_000_000, "0.005"),
    ],
)
def test_gigabytes(size: int, text: str) -> None:
    assert gpu.gigabytes(size) == text
