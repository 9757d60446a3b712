"""Host time of a decode step outside the model: scheduling, metadata, sampling and bookkeeping, on
this machine's CPU.

    python benchmarks/host_time.py [--batch 64] [--context 1000] [--steps 300] [--max-seq-len 4096]
    python benchmarks/host_time.py --config config.json [--batch 64] [--context 1000] [--steps 300]

The engine runs a model that does nothing but return the same logits. A step is timed without this
model and without the sampler, whose work is a GPU's where there is one; the sampler's own time is
shown. The metadata alone is also made in the way that rebuilds it each step from the sequences'
Python lists, beside the present one, in turns within the same steps. Every figure is a median, in
microseconds; the least time of a step is shown, too, for machines that others use.

With `--config` (of a model, of which random weights are made) the whole step is timed on a GPU: how
long it takes, how long the host waits for the device in it, and, in steps of their own since more
clocks take more time, what the rest is spent on, CUDA's own calls apart.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from onboard import SamplingParams
from onboard.bench.measure import decoding
from onboard.bench.shape import Shape
from onboard.bench.subject import open_subject
from onboard.bench.whole_measurement import fitted_runtime, vocabulary_of
from onboard.cache.batch import SequenceInfo
from onboard.cache.cached_sequence import CachedSequenceInterface
from onboard.cache.step_buffer import StepBuffer
from onboard.runtime.build import build_engine
from onboard.runtime.engine import Engine
from onboard.runtime.scheduling.request import Step
from onboard.runtime.scheduling.scheduler import Scheduler

VOCABULARY = 1000


class NoModel(nn.Module):
    """Takes what every cached graph takes and returns logits [1, sequences, vocabulary] that were
    made before.
    """

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
        max_batch_size=batch,
        max_seq_len=max_seq_len,
        max_num_tokens=8192,
        page_size=32,
        device=torch.device("cpu"),
    )
    cache = CachedSequenceInterface(info)
    cache.allocate(1 + batch * info.pages_per_sequence)
    return Engine(NoModel(batch), cache)


def from_lists(info: SequenceInfo, step: Step, page_rows: dict[int, Any]) -> None:
    """Describe a step from the sequences' lists; only arrays of pages that have not changed are
    kept.
    """
    chunks = step.chunks
    spans = [(chunk.sequence.tokens, chunk.sequence.num_cached, chunk.length) for chunk in chunks]
    token_ids = np.array(
        [token for tokens, start, length in spans for token in tokens[start : start + length]]
    )
    starts, lengths = (
        np.array([start for _, start, _ in spans]),
        np.array([length for _, _, length in spans]),
    )
    for chunk in chunks:
        if len(page_rows.get(chunk.sequence.slot, ())) != len(chunk.sequence.pages[0]):
            page_rows[chunk.sequence.slot] = np.array(chunk.sequence.pages[0], dtype=np.int32)
    rows = [page_rows[chunk.sequence.slot] for chunk in chunks]
    table = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
    for target, row in zip(table, rows, strict=True):
        target[: len(row)] = row
    info.set_batch(
        token_ids, starts, lengths, table, slots=np.array([chunk.sequence.slot for chunk in chunks])
    )


def microseconds(work: Callable[[], Any]) -> float:
    """Return the wall time of one call."""
    start = time.perf_counter()
    work()
    return 1e6 * (time.perf_counter() - start)


def times_of_sampler(latest: Any, times: list[float]) -> None:
    """Append the time of every call of the sampler, which on a GPU is the GPU's work, to
    `times`.
    """
    choose = latest.choose

    def timed(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        tokens = choose(*args, **options)
        times.append(1e6 * (time.perf_counter() - start))
        return tokens

    latest.choose = timed


def measure(
    batch: int, context: int, steps: int, max_seq_len: int, params: dict[str, Any]
) -> dict[str, list[float]]:
    """Return the times of every step, by what was timed."""
    engine, former = make_engine(batch, max_seq_len), make_engine(batch, max_seq_len)
    for _ in range(batch):
        prompt = [random.randrange(VOCABULARY) for _ in range(context)]
        engine.submit(prompt, SamplingParams(max_tokens=steps + 20, ignore_eos=True, **params))
    while (
        any(request.num_pending > 1 for request in engine.scheduler.running)
        or engine.scheduler.waiting
    ):
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
        step = (
            engine.scheduler.schedule()
        )  # what is timed next changes nothing: the step is scheduled again
        times["lists"].append(
            microseconds(lambda step=step: from_lists(former.cache.info, step, page_rows))
        )  # type: ignore[misc]
        times["rows"].append(
            microseconds(
                lambda step=step: engine.cache.info.set_rows(step.rows.slots, step.lengths)
            )
        )  # type: ignore[misc]
    return times


Calls = dict[str, list[tuple[type, str]]]
WAITING: Calls = {"waiting": [(torch.cuda.Event, "synchronize")]}
CALLS: Calls = {
    **WAITING,
    "CUDA's calls": [
        (torch.cuda.Event, "record"),
        (torch.cuda.CUDAGraph, "replay"),
        (StepBuffer, "upload"),
    ],
    "schedule": [
        (Scheduler, name) for name in ("schedule", "schedule_ahead", "launched", "settle", "append")
    ],
    "metadata": [(SequenceInfo, "set_rows")],
}
"""What a step is spent on; what is nested counts for the inner one."""


@contextmanager
def timed_calls(timed_ones: Calls) -> Iterator[dict[str, float]]:
    """Add up the microseconds of calls within the block."""
    times, inner = dict.fromkeys(timed_ones, 0.0), [0.0]

    def timed(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            inner.append(0.0)
            result = function(*args, **options)
            spent = 1e6 * (time.perf_counter() - start)
            times[label] += spent - inner.pop()
            inner[-1] += spent
            return result

        return call

    with ExitStack() as stack:
        for label, calls in timed_ones.items():
            for owner, name in calls:
                stack.enter_context(patch.object(owner, name, timed(label, getattr(owner, name))))
        yield times


def timed_steps(engine: Engine, calls: Calls, count: int) -> list[dict[str, float]]:
    """Return the time of each step, and what of it `calls` took."""
    steps = []
    with timed_calls(calls) as times:
        for _ in range(count):
            times.update(dict.fromkeys(times, 0.0))
            steps.append({"step": microseconds(engine.step), **times})
    return steps


def measure_on_gpu(config: Path, shape: Shape) -> list[dict[str, float]]:
    """Return what decode steps of a whole batch were spent on: half of `shape.output` timed
    coarsely, half finely.
    """
    overrides = {"device": "cuda", "dtype": "bfloat16"}
    with open_subject(
        str(config), Path(), config=None, overrides=overrides, random_weights=True
    ) as subject:
        roomy = replace(shape, output=shape.output + 20)
        runtime = fitted_runtime(subject, [roomy], torch.device("cuda"))
        engine = build_engine(subject.folder, runtime, root=subject.root, model=subject.name)
    with decoding(engine, roomy.prompts(vocabulary_of(subject), seed=0), roomy.output):
        for _ in range(10):
            engine.step()
        half = shape.output // 2
        return timed_steps(engine, WAITING, half) + timed_steps(engine, CALLS, half)


def show_gpu(steps: list[dict[str, float]]) -> None:
    """Print the medians."""
    for each in steps:
        each["host"] = each["step"] - each["waiting"]
        each["the rest"] = each["host"] - sum(each.get(label, 0.0) for label in list(CALLS)[1:])
    coarse, fine = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    columns = {"step": coarse, "waiting": coarse, "host": coarse}
    columns |= dict.fromkeys([*list(CALLS)[1:], "the rest"], fine)
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    medians = (statistics.median(each[column] for each in some) for column, some in columns.items())
    print("|", " | ".join(f"{median:.1f}" for median in medians), "|")


@torch.inference_mode()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"batch": 64, "context": 1000, "steps": 300, "max-seq-len": 4096}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--config", type=Path, help="config.json of a model to run on a GPU")
    args = parser.parse_args()
    if args.config is not None:
        show_gpu(measure_on_gpu(args.config, Shape(args.batch, args.context, args.steps)))
        return
    columns = [
        "sampling",
        "metadata from lists",
        "metadata from rows",
        "ratio",
        "step",
        "least",
        "sampler",
    ]
    print(f"| {' | '.join(columns)} |")
    print("|---|---|---|---|---|---|---|")
    for name, params in {"greedy": {"temperature": 0.0}, "seeded": {"seed": 1}}.items():
        times = measure(args.batch, args.context, args.steps, args.max_seq_len, params)
        lists, rows, step, sampler = (
            statistics.median(times[key]) for key in ("lists", "rows", "step", "sampler")
        )
        figures = (lists, rows, lists / rows, step, min(times["step"]), sampler)
        print(f"| {name} |", " | ".join(f"{figure:.1f}" for figure in figures), "|")


if __name__ == "__main__":
    main()
