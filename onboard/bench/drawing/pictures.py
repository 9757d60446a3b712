"""The pictures of a measurement, as SVG: a roofline and the start-up's timeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onboard.bench.peers import PeerRun
from onboard.bench.report_document import work_of
from onboard.bench.whole_measurement import Report
from onboard.render import render

_COLORS = {"onboard": "#1565c0", "hf": "#ef6c00", "hf-compiled": "#6a1b9a"}
_STAGE_COLORS = (
    "#1565c0",
    "#2e7d32",
    "#ef6c00",
    "#6a1b9a",
    "#00838f",
    "#c62828",
    "#9e9d24",
    "#5d4037",
    "#455a64",
)
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 860, 536, 84, 68, 24, 56
_LETTER = 7.2
"""The most that a letter of a stage's name takes on average, in pixels."""


@dataclass(frozen=True)
class Point:
    """A step in the roofline: operations a byte, operations a second."""

    label: str
    series: str
    step: str
    intensity: float
    rate: float


def roofline(report: Report) -> str:
    """Return the picture of every prefill and decode step under the machine's two ceilings
    (Williams et al. 2009).
    """
    points = list(_points(report))
    ceilings = report.ceilings
    axes = _Axes.around(points, ceilings.read_bandwidth, ceilings.matmul_rate)
    ridge = ceilings.matmul_rate / ceilings.read_bandwidth
    roof = [axes.x_range[0], min(ridge, axes.x_range[1]), axes.x_range[1]]
    return render(
        "bench/roofline.svg.j2",
        title=report.subject.name,
        made=report.made,
        caption=f"{ceilings.read_bandwidth / 1e9:,.0f} GB/s read, {ceilings.matmul_rate / 1e12:,.2f} TFLOP/s",
        width=_WIDTH,
        height=_HEIGHT,
        plot={"left": _LEFT, "top": _TOP, "right": _WIDTH - _RIGHT, "bottom": _HEIGHT - _BOTTOM},
        roof=[
            (axes.x(x), axes.y(min(x * ceilings.read_bandwidth, ceilings.matmul_rate)))
            for x in roof
        ],
        x_ticks=[(axes.x(10.0**e), _power(e)) for e in _exponents(axes.x_range)],
        y_ticks=[(axes.y(10.0**e), _power(e)) for e in _exponents(axes.y_range)],
        points=[
            (point, axes.x(point.intensity), axes.y(point.rate), _COLORS[point.series])
            for point in points
        ],
        legend=[
            (series, _COLORS[series]) for series in dict.fromkeys(point.series for point in points)
        ],
    )


def _points(report: Report) -> Sequence[Point]:
    points = []
    for result in report.results:
        if result.measured is None:
            continue
        times = {"onboard": (result.measured.prefill, result.measured.decode_step)}
        times |= {
            n: (p.prefill, p.decode_step) for n, p in result.peers.items() if isinstance(p, PeerRun)
        }
        for series, seconds in times.items():
            for (step, work), time in zip(work_of(result, report).items(), seconds, strict=True):
                label = f"batch {result.shape.batch}, context {result.shape.context}"
                points.append(Point(label, series, step, work.intensity, work.operations / time))
    return points


@dataclass(frozen=True)
class _Axes:
    """Two logarithmic axes."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]

    @staticmethod
    def around(points: Sequence[Point], bandwidth: float, rate: float) -> _Axes:
        xs = [point.intensity for point in points] + [rate / bandwidth]
        ys = [point.rate for point in points] + [rate]
        return _Axes(_decades(xs), _decades(ys))

    def x(self, value: float) -> float:
        return round(_LEFT + _share(value, self.x_range) * (_WIDTH - _RIGHT - _LEFT), 1)

    def y(self, value: float) -> float:
        return round(
            _HEIGHT - _BOTTOM - _share(value, self.y_range) * (_HEIGHT - _BOTTOM - _TOP), 1
        )


def _decades(values: Sequence[float]) -> tuple[float, float]:
    return 10.0 ** math.floor(math.log10(min(values))), 10.0 ** math.ceil(
        math.log10(max(values)) + 0.05
    )


def _share(value: float, limits: tuple[float, float]) -> float:
    low, high = limits
    return math.log(max(value, low) / low) / math.log(high / low)


def _exponents(limits: tuple[float, float]) -> range:
    return range(round(math.log10(limits[0])), round(math.log10(limits[1])) + 1)


def _power(exponent: int) -> str:
    prefixes = {0: "", 3: "K", 6: "M", 9: "G", 12: "T", 15: "P"}
    base = max(key for key in prefixes if key <= max(exponent, 0))
    return f"{10.0 ** (exponent - base):g}{prefixes[base]}"


def timeline(report: Report) -> str:
    """Return the picture of the start: a bar for each stage, from the start of the process on."""
    row, width, top = 26, 860, 76
    total = max(report.startup.total, 1e-9)
    left = round(24 + _LETTER * max((len(span.name) for span in report.startup.spans), default=0))
    bars: list[dict[str, Any]] = []
    for index, span in enumerate(report.startup.spans):
        longest = sorted(span.parts.items(), key=lambda part: -part[1])[:3]
        bars.append(
            {
                "name": span.name,
                "y": top + index * row,
                "x": round(left + span.start / total * (width - left - 100), 1),
                "width": round(max(span.seconds / total * (width - left - 100), 1.0), 1),
                "seconds": span.seconds,
                "color": _STAGE_COLORS[index % len(_STAGE_COLORS)],
                "detail": ", ".join(f"{key} {seconds:.2f} s" for key, seconds in longest),
            }
        )
    return render(
        "bench/startup.svg.j2",
        title=report.subject.name,
        made=report.made,
        caption=f"{total:.1f} s from the start of the process to the first token",
        bars=bars,
        width=width,
        height=top + 16 + row * len(bars),
        row=row - 6,
        left=left,
    )
