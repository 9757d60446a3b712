"""What a GPU does in one decode step: its kernels one after the other, and the gaps between them.

On the CPU these are the operators that the step calls, one after the other.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from onboard.bench.ceilings import synchronize
from onboard.bench.measure import decoding
from onboard.runtime.engine import Engine

LONGEST_GAP = 3.0
"""Microseconds without a kernel that are worth a line."""
_STEPS = 5
_MARK = "onboard decode step"
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Event:
    """A kernel (a copy, an operator); microseconds since the step began."""

    name: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        """When it was done."""
        return self.start + self.duration


@dataclass(frozen=True)
class Gap:
    """Microseconds in which nothing ran."""

    start: float
    duration: float
    before: str
    after: str


@dataclass(frozen=True)
class Profile:
    """One decode step, up to where the next one begins."""

    events: list[Event]
    duration: float
    """Microseconds from its first kernel to the first one of the step after it."""

    @property
    def busy(self) -> float:
        """Microseconds in which something ran."""
        return self.duration - sum(gap.duration for gap in self._all_gaps())

    def gaps(self) -> list[Gap]:
        """Return the gaps that are longer than `LONGEST_GAP`, the longest first."""
        return sorted(
            (gap for gap in self._all_gaps() if gap.duration > LONGEST_GAP),
            key=lambda gap: -gap.duration,
        )

    def totals(self) -> list[tuple[str, int, float]]:
        """Return each kernel's name, calls and the microseconds that it adds to the step, the longest
        first: from when those before it are done, which it may overlap, so that all add up to `busy`.
        """
        calls, times, done = Counter[str](), Counter[str](), 0.0
        for event in self.events:
            calls[event.name] += 1
            times[event.name] += max(0.0, event.end - max(event.start, done))  # type: ignore[assignment]
            done = max(done, event.end)
        return [(name, calls[name], float(time)) for name, time in times.most_common()]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for a report."""
        return {
            "step_us": self.duration,
            "busy_us": self.busy,
            "kernels": len(self.events),
            "gaps": [
                {"start_us": g.start, "us": g.duration, "before": g.before, "after": g.after}
                for g in self.gaps()
            ],
            "totals": [
                {"name": name, "calls": calls, "us": time} for name, calls, time in self.totals()
            ],
        }

    def _all_gaps(self) -> Iterator[Gap]:
        end, before = 0.0, ""
        for event in self.events:
            if event.start > end:
                yield Gap(end, event.start - end, before, event.name)
            if event.end >= end:
                end, before = event.end, event.name
        if self.duration > end:
            yield Gap(end, self.duration - end, before, "the next step")


def profile_decode(engine: Engine, prompts: Sequence[Sequence[int]], output: int) -> Profile:
    """Record a decode step of a whole batch, one of several in a row; needs at least eight tokens
    of output.
    """
    device = engine.cache.info.device
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with decoding(engine, prompts, max(output, _STEPS + 3)):
        with profile(activities=kinds):  # the first use of the profiler takes long
            engine.step()
            synchronize(device)
        with profile(activities=kinds) as recorded:
            for _ in range(_STEPS):
                with record_function(_MARK):
                    engine.step()
            synchronize(device)
    trace = _trace(recorded)
    return gpu_step(trace) if device.type == "cuda" else _cpu_step(trace)


def _trace(recorded: Any) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def gpu_step(trace: Sequence[dict[str, Any]]) -> Profile:
    """Cut one step out of a trace, from a CUDA graph's first kernel (without any: a copy to the
    GPU) to the next.
    """
    events = sorted((e for e in trace if e.get("cat") in _ON_GPU), key=lambda e: float(e["ts"]))
    begins = _graph_begins(trace, events) or [e["ts"] for e in events if "HtoD" in e["name"]]
    middle = len(begins) // 2
    if len(begins) < 2:
        begins, middle = [events[0]["ts"], events[-1]["ts"] + events[-1]["dur"]], 1
    return _cut(events, begins[middle - 1], begins[middle])


def _graph_begins(trace: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]]) -> list[float]:
    """Return when the first kernel of each launched CUDA graph began."""
    launches = {e["args"].get("correlation") for e in trace if "cudaGraphLaunch" in e["name"]}
    first: dict[Any, float] = {}
    for event in events:
        if (launch := event["args"].get("correlation")) in launches:
            first.setdefault(launch, event["ts"])
    return sorted(first.values())


def _cpu_step(trace: Sequence[dict[str, Any]]) -> Profile:
    """Cut one step out of a trace of the CPU: the operators of its thread that no other operator
    calls.
    """
    marks = sorted((e for e in trace if e["name"] == _MARK), key=lambda e: float(e["ts"]))
    mark = marks[len(marks) // 2]
    operators = [e for e in trace if e.get("cat") == "cpu_op" and e["tid"] == mark["tid"]]
    outermost, end = [], 0.0
    for event in sorted(operators, key=lambda e: (float(e["ts"]), -float(e["dur"]))):
        if event["ts"] >= end:
            outermost.append(event)
            end = event["ts"] + event["dur"]
    return _cut(outermost, mark["ts"], mark["ts"] + mark["dur"])


def _cut(events: Sequence[dict[str, Any]], start: float, end: float) -> Profile:
    inside = [e for e in events if start <= e["ts"] < end]
    return Profile([Event(e["name"], e["ts"] - start, e["dur"]) for e in inside], end - start)
