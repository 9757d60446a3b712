"""Times, figures and pictures of a benchmark, on times that were made up and on a tiny engine."""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from onboard.bench import peers
from onboard.bench.drawing.profile_picture import picture
from onboard.bench.measure import (
    Measured,
    Run,
    _decode_steps,
    _token_times,
    decoding,
    measure,
    run_batch,
)
from onboard.bench.metrics import metrics
from onboard.bench.profile import Event, Profile, gpu_step, profile_decode
from onboard.bench.shape import Shape, grid
from onboard.bench.startup import StartUp, since_start
from onboard.bench.whole_measurement import why_not
from onboard.errors import OnboardError
from onboard.graph.context import HistoryEntry
from tests.support.runtime.tiny import Tiny

ATTENTION = ("onboard::torch_cached_attention", "aten::scaled_dot_product_attention")
"""What attention looks like from outside: through the dispatcher, and called directly."""


def test_steps_that_decode_everything_are_told_from_those_that_do_not() -> None:
    times = [1.0, 2.0, 3.5, 4.5, 5.0]
    # The second prompt is read in two steps, the first ends earlier
    counts = [
        [1, 0],
        [2, 1],
        [3, 2],
        [4, 3],
        [4, 4],
    ]
    assert _token_times(times, counts) == [[1.0, 2.0, 3.5, 4.5], [2.0, 3.5, 4.5, 5.0]]
    assert _decode_steps(times, counts) == [1.5, 1.0]


def test_figures_are_vllms_on_times_that_were_made_up() -> None:
    runs = [
        Run(4.0, [[1.0, 2.0, 4.0], [2.0, 3.0, 3.5]], [1.0]),
        Run(2.0, [[0.5, 1.0, 2.0], [1.0, 1.5, 2.0]], [0.5]),
    ]
    found = metrics(Measured(Shape(2, 10, 3), [1.0], runs, [], [], 0))
    assert found["completed"] == found["num_prompts"] == 4
    assert (found["total_input_tokens"], found["total_output_tokens"], found["duration"]) == (
        40,
        12,
        6.0,
    )
    assert found["request_throughput"] == pytest.approx(4 / 6)
    assert found["output_throughput"] == pytest.approx(12 / 6)
    assert found["total_token_throughput"] == pytest.approx(52 / 6)
    assert found["mean_ttft_ms"] == pytest.approx(1e3 * statistics.fmean([1, 2, 0.5, 1]))
    assert found["median_tpot_ms"] == pytest.approx(1e3 * statistics.median([1.5, 0.75, 0.75, 0.5]))
    assert found["std_tpot_ms"] == pytest.approx(1e3 * statistics.pstdev([1.5, 0.75, 0.75, 0.5]))
    assert found["mean_itl_ms"] == pytest.approx(
        1e3 * statistics.fmean([1, 2, 1, 0.5, 0.5, 1, 0.5, 0.5])
    )
    assert found["p99_e2el_ms"] == pytest.approx(1e3 * (3.5 + 0.97 * 0.5))
    assert found["avg_latency"] == 3.0


def test_the_engine_is_timed_token_by_token(llama: Tiny) -> None:
    engine = llama.engine(max_num_tokens=10)  # prompts of 8 are read one after the other
    shape = Shape(3, 8, 9)
    begin = time.perf_counter()
    run = run_batch(engine, shape.prompts(97, seed=1), shape.output)
    assert run.duration <= time.perf_counter() - begin
    assert [len(times) for times in run.tokens] == [9, 9, 9]
    assert all(times == sorted(times) for times in run.tokens)
    assert run.duration == max(times[-1] for times in run.tokens)
    assert run.first_tokens[0] < run.first_tokens[1] < run.first_tokens[2]
    assert 0 < len(run.decode_steps) <= 8
    assert engine.scheduler.busy is False


def test_a_shape_that_does_not_fit_says_why(llama: Tiny) -> None:
    engine = llama.engine(kv_cache_config={"max_tokens": 60})
    assert why_not(engine, Shape(2, 20, 8)) == ""
    assert "room for 2 such sequences" in why_not(engine, Shape(3, 20, 8))
    assert "longer than the model's 64" in why_not(engine, Shape(1, 60, 8))
    assert "--output-len" in why_not(llama.engine(max_num_tokens=8), Shape(4, 8, 3))
    assert grid([1, 2], [8], 3) == [Shape(1, 8, 3), Shape(2, 8, 3)]


def test_a_decoding_batch_is_dropped_at_the_end(llama: Tiny) -> None:
    engine = llama.engine()
    free = engine.cache.groups[0].allocator.num_free
    with decoding(engine, [[1, 2, 3], [4, 5]], 8):
        assert [len(request.generated) >= 2 for request in engine.scheduler.running] == [True, True]
    assert not engine.scheduler.busy
    assert engine.cache.groups[0].allocator.num_free == free
    measured = measure(engine, Shape(2, 5, 6), vocabulary=97, seed=0, repeats=2)
    assert (len(measured.prefills), len(measured.runs)) == (2, 2)
    assert 0 < measured.decode_step < measured.runs[0].duration


def test_stages_of_a_start_follow_each_other() -> None:
    start, begin = StartUp(), since_start()
    entries = [
        HistoryEntry(key, stage, True, False, 1, s, True, True, 0) for key, stage, s in _TRANSFORMS
    ]
    time.sleep(0.06)
    start.built(begin, entries)
    with start.stage("first token"):
        time.sleep(0.01)
    assert [span.name for span in start.spans] == [
        "config and files",
        "export",
        "compile",
        "first token",
    ]
    assert start.spans[1].parts == pytest.approx({"a": 0.01, "b": 0.02})
    for before, after in zip(start.spans, start.spans[1:], strict=False):
        assert before.start + before.seconds == pytest.approx(after.start, abs=5e-3)
    assert start.total == pytest.approx(since_start(), abs=0.05)


_TRANSFORMS = (("a", "export", 0.01), ("b", "export", 0.02), ("c", "compile", 0.01))


def test_one_step_is_cut_out_of_a_gpus_trace() -> None:
    def event(
        cat: str, name: str, ts: float, dur: float, correlation: int = 0
    ) -> dict[str, object]:
        return {
            "ph": "X",
            "cat": cat,
            "name": name,
            "ts": ts,
            "dur": dur,
            "args": {"correlation": correlation},
        }

    trace = [event("cuda_runtime", "cudaGraphLaunch", 90 + 100 * i, 5, 7 + i) for i in range(3)]
    for i in range(3):
        trace += [
            event("gpu_memcpy", "Memcpy HtoD", 95 + 100 * i, 1),
            event("kernel", "first", 100 + 100 * i, 30, 7 + i),
            event("kernel", "beside", 110 + 100 * i, 40, 7 + i),
            event("kernel", "last", 155 + 100 * i, 20, 7 + i),
        ]
    step = gpu_step(trace)
    assert [event.name for event in step.events] == ["first", "beside", "last", "Memcpy HtoD"]
    assert step.duration == 100
    assert step.busy == 50 + 20 + 1
    assert [(gap.start, gap.duration, gap.before, gap.after) for gap in step.gaps()] == [
        (75, 20, "last", "Memcpy HtoD"),
        (50, 5, "beside", "last"),
        (96, 4, "Memcpy HtoD", "the next step"),
    ]
    assert [time for *_, time in step.totals()] == [30, 20, 20, 1]
    assert ("beside", 1, 20.0) in step.totals(), "beyond what it shares with the first one"
    ElementTree.fromstring(picture(step, "a <step>", "a GPU"))


def test_a_step_on_the_cpu_is_its_operators(llama: Tiny) -> None:
    step = profile_decode(llama.engine(), [[1, 2, 3], [4, 5, 6]], 12)
    assert sum(calls for name, calls, _ in step.totals() if name in ATTENTION) == 2
    assert 0 < step.busy <= step.duration
    assert all(
        event.end <= after.start for event, after in zip(step.events, step.events[1:], strict=False)
    )
    assert Profile([Event("a", 0, 5)], 5).gaps() == []


@pytest.mark.parametrize("hidden", [1, 99])
def test_a_peers_step_that_noise_hides_is_measured_again(
    hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first rounds the whole takes less time than its first token does."""
    rounds = [(3.0, 2.0)] * hidden + [(1.0, 4.0)] * 7
    times = iter([9.0, *(time for each in rounds for time in each)])
    monkeypatch.setattr(peers, "synchronized", lambda call, device: next(times))
    model = SimpleNamespace(generate=lambda *_, **__: None)
    options: dict[str, Any] = {"vocabulary": 9, "seed": 1, "device": torch.device("cpu")}
    if hidden > 8:
        with pytest.raises(OnboardError, match="took no longer than one"):
            peers.measure_peer(model, "hf", Shape(1, 8, 4), repeats=1, **options)
        return
    found = peers.measure_peer(model, "hf", Shape(1, 8, 4), repeats=1, **options)
    assert found.decode_step == pytest.approx((3.0 - 2.0) / 3)
