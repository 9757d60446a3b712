"""Host time of a decode step outside the model: scheduling, metadata, sampling and bookkeeping, on this machine's CPU.

    python benchmarks/host_time.py [--batch 64] [--context 1000] [--steps 300] [--max-seq-len 4096]

The engine runs a model that does nothing but return the same logits. A step is timed without this model and without
the sampler, whose work is a GPU's where there is one; the sampler's own time is shown. The metadata alone is also made
in the way that rebuilds it each step from the sequences' Python lists, beside the present one, in turns within the same
steps. Every figure is a median, in microseconds; the least time of a step is shown, too, for machines that others use.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from onboard import SamplingParams
from onboard.graph.sequence import CachedSequenceInterface, SequenceInfo
from onboard.runtime.engine import Engine
from onboard.runtime.request import Step

VOCABULARY = 1000


class NoModel(nn.Module):
    """Takes what every cached graph takes and returns logits [1, sequences, vocabulary] that were made before."""

    input_names = ("input_ids", "kv_lens", "block_table", "logits_gather_indices")

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.logits = torch.randn(1, batch, VOCABULARY)
        self.seconds: list[float] = []

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of as many sequences as there are."""
        start = time.perf_counter()
        logits = self.logits[:, : inputs["logits_gather_indices"].shape[0]]
        self.seconds.append(time.perf_counter() - start)
        return logits


def make_engine(batch: int, max_seq_len: int) -> Engine:
    """Return an engine with room for `batch` sequences of full length and no caches."""
    info = SequenceInfo(
        max_batch_size=batch, max_seq_len=max_seq_len, max_num_tokens=8192, page_size=32, device=torch.device("cpu")
    )
    cache = CachedSequenceInterface(info)
    cache.allocate(1 + batch * info.pages_per_sequence)
    return Engine(NoModel(batch), cache)


def from_lists(info: SequenceInfo, step: Step, page_rows: dict[int, Any]) -> None:
    """Describe a step from the sequences' lists; only arrays of pages that have not changed are kept."""
    chunks = step.chunks
    spans = [(chunk.sequence.tokens, chunk.sequence.num_cached, chunk.length) for chunk in chunks]
    token_ids = np.array([token for tokens, start, length in spans for token in tokens[start : start + length]])
    starts, lengths = np.array([start for _, start, _ in spans]), np.array([length for _, _, length in spans])
    for chunk in chunks:
        if len(page_rows.get(chunk.sequence.slot, ())) != len(chunk.sequence.pages[0]):
            page_rows[chunk.sequence.slot] = np.array(chunk.sequence.pages[0], dtype=np.int32)
    rows = [page_rows[chunk.sequence.slot] for chunk in chunks]
    table = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
    for target, row in zip(table, rows, strict=True):
        target[: len(row)] = row
    info.set_batch(token_ids, starts, lengths, table, slots=np.array([chunk.sequence.slot for chunk in chunks]))


def microseconds(work: Callable[[], Any]) -> float:
    """Return the wall time of one call."""
    start = time.perf_counter()
    work()
    return 1e6 * (time.perf_counter() - start)


def times_of_sampler(latest: Any, times: list[float]) -> None:
    """Append the time of every call of the sampler, which on a GPU is the GPU's work, to `times`."""
    choose = latest.choose

    def timed(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        tokens = choose(*args, **options)
        times.append(1e6 * (time.perf_counter() - start))
        return tokens

    latest.choose = timed


def measure(batch: int, context: int, steps: int, max_seq_len: int, params: dict[str, Any]) -> dict[str, list[float]]:
    """Return the times of every step, by what was timed."""
    engine, former = make_engine(batch, max_seq_len), make_engine(batch, max_seq_len)
    for _ in range(batch):
        prompt = [random.randrange(VOCABULARY) for _ in range(context)]
        engine.submit(prompt, SamplingParams(max_tokens=steps + 20, ignore_eos=True, **params))
    while any(request.num_pending > 1 for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    for _ in range(10):
        engine.step()
    times: dict[str, list[float]] = {"step": [], "sampler": [], "rows": [], "lists": []}
    times_of_sampler(engine.cache.latest, times["sampler"])
    page_rows: dict[int, Any] = {}
    assert isinstance(engine.gm, NoModel)
    for _ in range(steps):
        engine.gm.seconds.clear()
        whole = microseconds(engine.step)
        times["step"].append(whole - 1e6 * sum(engine.gm.seconds) - times["sampler"][-1])
        step = engine.scheduler.schedule()  # what is timed next changes nothing: the step is scheduled again
        times["lists"].append(microseconds(lambda step=step: from_lists(former.cache.info, step, page_rows)))  # type: ignore[misc]
        times["rows"].append(microseconds(lambda step=step: engine.cache.info.set_rows(step.slots, step.lengths)))  # type: ignore[misc]
    return times


@torch.inference_mode()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"batch": 64, "context": 1000, "steps": 300, "max-seq-len": 4096}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    columns = ["sampling", "metadata from lists", "metadata from rows", "ratio", "step", "least", "sampler"]
    print(f"| {' | '.join(columns)} |")
    print("|---|---|---|---|---|---|---|")
    for name, params in {"greedy": {"temperature": 0.0}, "seeded": {"seed": 1}}.items():
        times = measure(args.batch, args.context, args.steps, args.max_seq_len, params)
        lists, rows, step, sampler = (statistics.median(times[key]) for key in ("lists", "rows", "step", "sampler"))
        figures = (lists, rows, lists / rows, step, min(times["step"]), sampler)
        print(f"| {name} |", " | ".join(f"{figure:.1f}" for figure in figures), "|")


if __name__ == "__main__":
    main()
