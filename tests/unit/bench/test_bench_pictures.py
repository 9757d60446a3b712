"""The pictures of a measurement: what their words say, and that they can be read on any page."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from onboard.bench.ceilings import Ceilings
from onboard.bench.drawing.pictures import roofline, timeline
from onboard.bench.drawing.profile_picture import picture
from onboard.bench.measure import Measured, Run
from onboard.bench.profile import Event, Profile
from onboard.bench.shape import Shape
from onboard.bench.startup import StartUp, since_start
from onboard.bench.whole_measurement import Report, Result, Settings
from onboard.bench.work import ModelWork, Weights
from onboard.graph.context import HistoryEntry

SVG = "{http://www.w3.org/2000/svg}"
HISTORY = (
    *(
        ("find_kept_graph", "cache", 0.01),
        ("export_model", "export", 0.4),
        ("fuse_moe", "compile", 0.02),
    ),
    *(("keep_graph", "cache", 0.2), ("warm_up", "compile", 0.1), ("compile_model", "compile", 3.0)),
)
"""Key, stage and seconds of a start that looks for a kept graph and keeps its own: two stages are
entered twice.
"""


class _Subject:
    name = "org/a <model>"


@pytest.fixture
def report() -> Report:
    return made_report()


def made_report() -> Report:
    """What a measurement would have found."""
    startup = StartUp()
    history = [
        HistoryEntry(key, stage, True, False, 1, s, True, True, 0) for key, stage, s in HISTORY
    ]
    startup.built(since_start(), history)
    shape = Shape(1, 8, 3)
    measured = Measured(shape, [0.1], [Run(1.0, [[0.5, 0.7, 1.0]], [0.2])], [], [], 0)
    ceilings = Ceilings("Some GPU 80GB", 1e12, 1e14)
    parts: dict[str, Any] = {
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "caches": 0,
        "facts": [],
    }
    return Report(
        subject=_Subject(),  # type: ignore[arg-type]
        settings=Settings([shape], seed=1),
        startup=startup,
        ceilings=ceilings,
        work=ModelWork(Weights(10**6, 10**6), (), heads=1),
        results=[Result(shape, measured)],
        date=datetime(2026, 1, 2, tzinfo=UTC),
        **parts,
    )


STEP = Profile([Event("a", 0, 10), Event("b", 20, 10)], 30)


def texts_of(svg: str) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_each_bar_of_a_start_has_a_name_of_its_own(report: Report) -> None:
    names = [text for text in texts_of(timeline(report))[3:] if not re.fullmatch(r"[\d.]+ s", text)]
    assert names == [
        *("config and files", "cache: find_kept_graph", "export", "compile: fuse_moe"),
        *("cache: keep_graph", "compile: compile_model"),
    ]
    assert report.startup.spans[-1].parts == pytest.approx({"warm_up": 0.1, "compile_model": 3.0})


def test_pictures_say_where_and_when(report: Report) -> None:
    for svg in (
        timeline(report),
        roofline(report),
        picture(STEP, report.subject.name, report.made),
    ):
        words = texts_of(svg)
        assert words[0] == "org/a <model>"
        assert "Some GPU 80GB, bfloat16, 2026-01-02" in words


def test_pictures_follow_dark_pages_and_narrow_ones(report: Report) -> None:
    """The page, its lines and its words have colours for dark pages; those of bars and points are
    read on both.
    """
    for svg in (timeline(report), roofline(report), picture(STEP, "a step", report.made)):
        tree = ElementTree.fromstring(svg)
        [style] = [each.text or "" for each in tree.iter(f"{SVG}style")]
        assert "prefers-color-scheme: dark" in style
        dark = set(re.findall(r'(\w+)\[(?:fill|stroke)="(#\w+)"\]', style))
        page = next(tree.iter(f"{SVG}rect"))
        used = {("rect", page.get("fill"))} | {
            ("text", each.get("fill")) for each in tree.iter(f"{SVG}text")
        }
        used |= {("line", each.get("stroke")) for each in tree.iter(f"{SVG}line")}
        assert used <= dark
        assert "max-width: 100%" in tree.get("style", "")


def test_one_gap_is_no_gaps() -> None:
    assert texts_of(picture(STEP, "", ""))[1].endswith("1 gap over 3 us")
