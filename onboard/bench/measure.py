"""Timing the engine on batches of random prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from onboard.bench.expert_hits import experts_hit
from onboard.bench.shape import Shape
from onboard.runtime.engine import Engine
from onboard.runtime.sampling_params import SamplingParams
from onboard.runtime.scheduling.request import Step


@dataclass(frozen=True)
class Run:
    """One batch, from its submission to its last token; times in seconds since the submission."""

    duration: float
    tokens: list[list[float]]
    """When each token of each request was there, by request."""
    decode_steps: list[float]
    """Durations of the steps in which every request got a token, or with drafts several, each after
    its first.
    """

    @property
    def first_tokens(self) -> list[float]:
        """When each request got its first token."""
        return [times[0] for times in self.tokens]


@dataclass(frozen=True)
class Measured:
    """What was measured of one shape."""

    shape: Shape
    prefills: list[float]
    """Seconds from the submission to the last first token, when nothing is decoded beside."""
    runs: list[Run]
    prefill_hits: list[float]
    decode_hits: list[float]
    """Experts of each mixture that a step's tokens went to."""
    peak_memory: int
    """Bytes."""

    @property
    def prefill(self) -> float:
        """The median prefill."""
        return statistics.median(self.prefills)

    @property
    def decode_step(self) -> float:
        """The mean time of a decode step of the whole batch, of the median run."""
        return statistics.median(statistics.fmean(run.decode_steps) for run in self.runs)


def measure(engine: Engine, shape: Shape, *, vocabulary: int, seed: int, repeats: int) -> Measured:
    """Measure one shape, after a pass that warms up everything which depends on it."""
    prompts = shape.prompts(vocabulary, seed)
    with decoding(engine, prompts, shape.output):
        decode_hits = experts_hit(engine)
    reset_peak_memory(engine.cache.info.device)
    prefills = [max(run_batch(engine, prompts, 1).first_tokens) for _ in range(repeats)]
    peak = peak_memory(engine.cache.info.device)
    prefill_hits = experts_hit(engine)
    reset_peak_memory(engine.cache.info.device)
    runs = [run_batch(engine, prompts, shape.output) for _ in range(repeats)]
    peak = max(peak, peak_memory(engine.cache.info.device))
    return Measured(shape, prefills, runs, prefill_hits, decode_hits, peak)


@contextmanager
def decoding(engine: Engine, prompts: Sequence[Sequence[int]], output: int) -> Iterator[None]:
    """Bring the engine to where it decodes all of a batch; at the end of the block its requests are
    dropped.
    """
    requests = [request for prompt in prompts for request in engine.submit(prompt, greedy(output))]
    try:
        while engine.scheduler.busy and not all(request.num_generated > 1 for request in requests):
            engine.step()
        yield
    finally:
        for request in requests:
            engine.cancel(request)


def run_batch(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    output: int,
    adapters: Sequence[str | None] = (),
) -> Run:
    """Generate `output` tokens greedily for each prompt, all submitted at once, with the adapter of
    its own if `adapters` has any.
    """
    start = time.perf_counter()
    params = [greedy(output, name) for name in adapters or [None] * len(prompts)]
    requests = [
        request
        for prompt, each in zip(prompts, params, strict=True)
        for request in engine.submit(prompt, each)
    ]
    times, counts = [], []

    def record(_: Step) -> None:
        times.append(time.perf_counter() - start)
        counts.append([request.num_generated for request in requests])

    engine.run(record)
    return Run(times[-1], _token_times(times, counts), _decode_steps(times, counts))


def greedy(output: int, lora: str | None = None) -> SamplingParams:
    """Return how requests are measured: they end after `output` tokens alone."""
    return SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, lora=lora)


def _token_times(times: Sequence[float], counts: Sequence[Sequence[int]]) -> list[list[float]]:
    rows: list[list[float]] = [[] for _ in counts[0]]
    for now, after in zip(times, counts, strict=True):
        for row, count in zip(rows, after, strict=True):
            row.extend([now] * (count - len(row)))
    return rows


def _decode_steps(times: Sequence[float], counts: Sequence[Sequence[int]]) -> list[float]:
    """Return the durations of the steps that gave every request a token, each of which had one
    already.
    """
    return [
        times[i] - times[i - 1]
        for i in range(1, len(times))
        if all(
            before and after > before
            for before, after in zip(counts[i - 1], counts[i], strict=True)
        )
    ]


def reset_peak_memory(device: torch.device) -> None:
    """Forget what a GPU's allocator has held at most so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that the GPU's allocator has held since; on the CPU the most that the
    process ever had.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    lines = status.read_text("ascii").splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
