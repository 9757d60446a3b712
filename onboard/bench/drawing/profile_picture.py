"""The picture of one decode step: its kernels in rows of equal time, gaps framed in red."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from onboard.bench.profile import LONGEST_GAP, Event, Gap, Profile
from onboard.render import render

_COLORS = (
    "#1565c0",
    "#2e7d32",
    "#ef6c00",
    "#6a1b9a",
    "#00838f",
    "#9e9d24",
    "#5d4037",
    "#ad1457",
    "#283593",
    "#558b2f",
)
_OTHER = "#90a4ae"
_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _LINE = 1100, 96, 16, 80, 34, 18
_MOST_ROWS, _MOST_GAPS = 12, 12


def picture(profile: Profile, title: str, made: str) -> str:
    """Return the SVG; `made` says where and when."""
    totals = profile.totals()
    colors = {name: color for (name, _, _), color in zip(totals, _COLORS, strict=False)}
    count = max(1, min(_MOST_ROWS, math.ceil(len(profile.events) / 40)))
    span = profile.duration / count
    below = _TOP + count * _ROW + 10
    legend = [
        {
            "y": below + i * _LINE,
            "color": colors.get(name, _OTHER),
            "text": f"{time:.1f} us in {calls}: {name[:110]}",
        }
        for i, (name, calls, time) in enumerate(totals[: len(_COLORS)])
    ]
    gaps = profile.gaps()
    under = below + len(legend) * _LINE + 8
    lines = [
        {"y": under + i * _LINE, "text": _gap_text(gap)} for i, gap in enumerate(gaps[:_MOST_GAPS])
    ]
    return render(
        "bench/profile.svg.j2",
        title=title,
        made=made,
        caption=f"{profile.duration:.1f} us, {len(profile.events)} kernels, something runs in {profile.busy:.1f} us; "
        f"{len(gaps)} {'gap' if len(gaps) == 1 else 'gaps'} over {LONGEST_GAP:g} us",
        rows=[_row(profile, colors, index, span) for index in range(count)],
        legend=legend,
        gaps=lines,
        width=_WIDTH,
        height=under + len(lines) * _LINE + 8,
        left=_LEFT,
    )


def _row(profile: Profile, colors: dict[str, str], index: int, span: float) -> dict[str, Any]:
    start = index * span
    bars = [
        {
            **box,
            "color": colors.get(event.name, _OTHER),
            "title": f"{event.duration:.1f} us: {event.name[:160]}",
        }
        for event, box in _boxes(profile.events, start, span)
    ]
    gaps = [{**box, "title": _gap_text(gap)} for gap, box in _boxes(profile.gaps(), start, span)]
    label = f"{start:.0f} us"
    return {
        "y": _TOP + index * _ROW,
        "label": label,
        "width": _WIDTH - _LEFT - _RIGHT,
        "bars": bars,
        "gaps": gaps,
    }


def _boxes(
    items: Iterable[Event | Gap], start: float, span: float
) -> Iterable[tuple[Any, dict[str, float]]]:
    """Yield what lies in a row, cut at its ends, with its place."""
    scale = (_WIDTH - _LEFT - _RIGHT) / max(span, 1e-9)
    for item in items:
        low, high = max(item.start, start), min(item.start + item.duration, start + span)
        if high > low:
            yield (
                item,
                {
                    "x": round(_LEFT + (low - start) * scale, 2),
                    "width": round((high - low) * scale, 2),
                },
            )


def _gap_text(gap: Gap) -> str:
    before = gap.before[:60] or "the step's begin"
    return f"gap of {gap.duration:.1f} us at {gap.start:.0f} us: {before} ... {gap.after[:60]}"
