"""A measurement's figures under the names that vLLM's `bench serve`, `bench latency` and `bench
throughput` use.

Source: vLLM, `vllm/benchmarks/{serve,latency,throughput}.py`. TTFT is from submission to the first
token, TPOT the mean time of the tokens after it, ITL the time between two tokens that follow each
other, E2EL from submission to the last token; all in milliseconds, over all requests of all
repeats. Times without "_ms" are in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from onboard.bench.measure import Measured, Run

PERCENTILES = (90, 99)
_LATENCY_PERCENTILES = (10, 25, 50, 75, 90, 99)


def metrics(measured: Measured) -> dict[str, Any]:
    """Return the figures of one shape."""
    shape, runs = measured.shape, measured.runs
    requests = [times for run in runs for times in run.tokens]
    return {
        "max_concurrency": shape.batch,
        "input_len": shape.context,
        "output_len": shape.output,
        **throughput([run.duration for run in runs], shape.batch, shape.context, shape.output),
        **latency([run.duration for run in runs]),
        **_spread("ttft", [times[0] for times in requests]),
        **_spread("tpot", [(times[-1] - times[0]) / (len(times) - 1) for times in requests]),
        **_spread("itl", [gap for run in runs for gap in _gaps(run)]),
        **_spread("e2el", [times[-1] for times in requests]),
    }


def throughput(durations: Sequence[float], batch: int, context: int, output: int) -> dict[str, Any]:
    """Return requests and tokens a second over some repeats of a batch."""
    duration, count = sum(durations), batch * len(durations)
    return {
        "num_prompts": count,
        "completed": count,
        "duration": duration,
        "total_input_tokens": count * context,
        "total_output_tokens": count * output,
        "request_throughput": count / duration,
        "output_throughput": count * output / duration,
        "total_token_throughput": count * (context + output) / duration,
    }


def latency(latencies: Sequence[float]) -> dict[str, Any]:
    """Return the time of a whole batch, in seconds."""
    found = np.percentile(latencies, _LATENCY_PERCENTILES).tolist()
    return {
        "avg_latency": float(np.mean(latencies)),
        "latencies": list(latencies),
        "percentiles": {
            str(each): value for each, value in zip(_LATENCY_PERCENTILES, found, strict=True)
        },
    }


def _gaps(run: Run) -> list[float]:
    return [after - before for times in run.tokens for before, after in pairwise(times)]


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    values = 1e3 * np.asarray(seconds)
    found = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
    found |= {f"p{each}": np.percentile(values, each) for each in PERCENTILES}
    return {f"{key}_{name}_ms": float(value) for key, value in found.items()}
