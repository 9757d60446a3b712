"""What a person opens, in a browser: reports, the coverage picture, a measurement's pictures, an
exported notebook.

On light and dark pages, 500 and 1280 pixels wide, without a network. `BROWSER_PICTURES=FOLDER`
keeps what was seen of pages.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from onboard.bench.drawing.pictures import roofline, timeline
from onboard.bench.drawing.profile_picture import picture as profile_picture
from onboard.cli.main import run
from onboard.workflow.phases.report import Report
from onboard.workflow.sweep.coverage_document import picture
from onboard.workflow.sweep.target_record import STATUSES
from tests.support.checkpoints import save_checkpoint
from tests.support.phases import make_context, make_run
from tests.unit.bench.test_bench_pictures import STEP, made_report
from tests.unit.phases.test_report import _finished, _tests
from tests.unit.sweep.test_sweep_coverage import coverage, entry

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.exhaustive
WIDTHS, SCHEMES = (500, 1280), ("light", "dark")
LONG = "a_name_that_is_long_enough_to_reach_over_the_edge_of_a_narrow_screen_" * 2


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    pytest.importorskip("playwright", reason='the extra "browser" is not installed')
    from tests.support.browser import opened

    with opened() as found:
        yield found


def _is_fine(
    chromium: Browser, page: Path, *, widths: tuple[int, ...] = WIDTHS, others: str = ""
) -> None:
    from tests.support.browser import problems

    found = []
    for width, scheme in itertools.product(widths, SCHEMES):
        kept = os.environ.get("BROWSER_PICTURES")
        is_page = page.suffix == ".html"  # a picture as a page of its own cannot be photographed
        seen = (
            Path(kept, f"{page.parent.name}-{page.stem}-{scheme}-{width}.png")
            if kept and is_page
            else None
        )
        wrong = problems(chromium, page, width=width, scheme=scheme, picture=seen, others=others)
        found += [f"{scheme}, {width}: {each}" for each in wrong]
    assert not found, "\n".join(found)


def test_what_is_wrong_with_a_page_is_seen(chromium: Browser, tmp_path: Path) -> None:
    from tests.support.browser import problems

    bad = {
        "contrast 1": "<p style='color: #999; background: #aaa'>grey</p>",
        "contrast 2": "<p style='opacity: 0.3'>thin</p>",
        "cut off: clipped": "<p style='width: 30px; overflow: hidden; white-space: nowrap'>clipped words</p>",
        "the page is": "<p style='width: 2000px'>wide</p>",
        "console: wrong": "<script>console.error('wrong')</script>",
        "error: broken": "<script>throw Error('broken')</script>",
        "fetches https://example.invalid/x.png": "<img src='https://example.invalid/x.png'>",
        "squeezed: letters": "<p style='width: 12px; overflow-wrap: anywhere'>letters and letters</p>",
        "one lies over two": "<svg><text y='20'>one</text><text x='5' y='22'>two</text></svg>",
        "contrast 1.": "<svg><rect width='99' height='99' fill='#222'/><text y='20' fill='#333'>dark</text></svg>",
    }
    page = tmp_path / "page.html"
    for what, text in bad.items():
        page.write_text(f"<!DOCTYPE html><title>a page</title>{text}")
        assert any(what in each for each in problems(chromium, page, width=500, scheme="light")), (
            what
        )
    folded, scrolled = (
        "<details><summary>a</summary><p>b</p></details>",
        "<b style='padding: 999px'>c</b>",
    )
    page.write_text(
        f"<!DOCTYPE html><title>a page</title>{folded}<p style='overflow-x: auto'>{scrolled}</p>"
    )
    assert problems(chromium, page, width=500, scheme="light") == []


@pytest.fixture(scope="module")
def onboarded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a mixture that was onboarded."""
    folder = tmp_path_factory.mktemp("onboarded")
    sizes = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "num_experts": 8}
    checkpoint = save_checkpoint(
        folder / "A-Mixture-With-A-Name-Of-Some-Length-8x1B", "qwen2_moe", **sizes
    )
    assert run([str(checkpoint), "--root", str(folder / "root"), "--device", "cpu"]) == 0
    return folder / "root"


def test_the_report_of_a_run(chromium: Browser, onboarded: Path) -> None:
    [page] = onboarded.glob(".onboard/*/report.html")
    _is_fine(chromium, page)


def test_the_report_of_a_large_model_with_much_to_say(chromium: Browser, tmp_path: Path) -> None:
    layers = [{"name": name, "layers": list(range(at, 61, 2)), "path": "model.layers.0"}
              for at, name in enumerate(("full_attention", "sliding_attention"))]  # fmt: skip
    context = make_context(
        tmp_path, f"org/{LONG}", layer_kinds=layers, tricky=[LONG, f"scales <{LONG}>"]
    )
    _finished(context)
    tests, whole = _tests(), make_run(status="bad_generation", agrees=False)
    tests["tests"][0] |= {
        "status": "failed",
        "message": f"AssertionError: {LONG} {'so far off ' * 40}",
    }
    whole["runs"]["full"] |= {"error": f"{LONG}: it broke", "facts": [f"a fact about {LONG}"]}
    whole["runs"]["full"]["prompts"][0] |= {"prompt": LONG, "output": "word " * 300}
    whole["provenance"] = {
        "versions": {"torch": "2"},
        "host": f"{LONG}, 2 cores",
        "onboard": f"onboard {LONG}",
    }
    context.write_json("tests.json", tests)
    context.write_json("run.json", whole)
    Report().run(context)
    _is_fine(chromium, context.artifact("report.html"))


def test_the_coverage_picture(chromium: Browser, tmp_path: Path) -> None:
    types = [
        entry(f"type{number}_{'x' * (number % 17)}", STATUSES[number % len(STATUSES)])
        for number in range(190)
    ]
    page = tmp_path / "coverage.svg"
    page.write_text(picture(coverage(*types)))
    _is_fine(chromium, page)


def test_the_pictures_of_a_measurement(chromium: Browser, tmp_path: Path) -> None:
    report = made_report()
    for name, text in {
        "startup": timeline(report),
        "roofline": roofline(report),
        "step": profile_picture(STEP, "org/a <model>: a decode step", report.made),
    }.items():
        page = tmp_path / f"{name}.svg"
        page.write_text(text)
        _is_fine(chromium, page)


def test_an_exported_notebook(chromium: Browser, onboarded: Path, tmp_path: Path) -> None:
    """The export's own scripts (formulas, widgets) are fetched from elsewhere by default: they are
    left out.

    Its style hides what a line of code has beyond a narrow screen and colours signs faintly; that
    is not ours to set.
    """
    exporters = pytest.importorskip("nbconvert", reason='the extra "browser" is not installed')
    [notebook] = onboarded.glob("cookbooks/*.ipynb")
    scripts = dict.fromkeys(("mathjax_url", "require_js_url", "jquery_url", "mermaid_js_url"), "")
    for theme in SCHEMES:
        page = tmp_path / f"notebook-{theme}.html"
        page.write_text(
            exporters.HTMLExporter(theme=theme, **scripts).from_filename(str(notebook))[0]
        )
        _is_fine(chromium, page, others=".highlight, .jp-InputPrompt")
