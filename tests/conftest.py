"""What all tests have in common: draws, a collector with little to look through, and graphs, which
few keep: the others see the transforms at work.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.drawing import cover, draw_for, drawing_for, drawn_from, name_the_draw

if TYPE_CHECKING:
    from tests.support.warm import Warm

os.environ["ONBOARD_CACHE"] = ""
# A job in the background ignores interrupts, and so would every process that the tests start and
# then interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Exports and interpreted kernels make many objects and few cycles: looking for those as often as
# Python does takes a twentieth of a run. Each file of tests begins with a look at all.
gc.set_threshold(50_000, 20, 50)
name_the_draw()
draw_for("")
if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.support.interpreter import quicken

    quicken()


DRAWN = {
    "equivalence": 8,
    "test_families": 5,
    "test_moe_families": 5,
    "test_more_families": 5,
    "test_mixer_families": 4,
}
"""Lot -> of how many of its models a run takes the tests: the shipped models' own, and those of
generated files.
"""

KEPT = {
    "serve",
    "test_adjusted_logits",
    "test_async_llm",
    "test_bench_measure",
    "test_bench_work",
    "test_embeddings",
    "test_engine",
    "test_failing_ranks",
    "test_images_and_sound",
    "test_kld_command",
    "test_layerwise",
    "test_llm",
    "test_modes",
    "test_overlap",
    "test_own_heads",
    "test_prompts_with_images",
    "test_reuse",
    "test_run",
    "test_speculation",
    "test_static_llm",
    "test_steps_padded_to_captured",
    "test_structured_outputs",
    "test_tied_heads",
    "test_windows",
}
"""A folder and files whose tests look at what models do once they are loaded, and change nothing of
how a graph is made: they load the same ones again and again.
"""

TESTED_ELSEWHERE = {"test_several_ranks"}
"""Tests of the suite that files of a lot leave to another one: `test_sixty_types`, of all models."""


def pytest_report_header() -> str:
    """Say how a run is repeated."""
    return f"draws: ONBOARD_DRAW={name_the_draw()} repeats them"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Draw anew for each test."""
    draw_for(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    """What tests share is drawn by its own name, whichever of them comes first."""
    if fixturedef.scope == "function":
        return (yield)
    with drawing_for(f"{request.node.nodeid} {fixturedef.argname}"):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Draw models of each lot, and cases of what is marked `drawn`; the others' tests are left to
    runs of all that is marked exhaustive.
    """
    _draw_cases(items)
    lots = {item: found for item in items if (found := _lot(item)) is not None}
    drawn = {
        lot: drawn_from({model for each, model in lots.values() if each == lot}, DRAWN[lot])
        for lot in DRAWN
    }
    for item, (lot, model) in lots.items():
        if model not in drawn[lot] or getattr(item, "originalname", "") in TESTED_ELSEWHERE:
            item.add_marker(pytest.mark.exhaustive)


def _draw_cases(items: Sequence[pytest.Item]) -> None:
    """Leave cases of tests that are marked `drawn` to exhaustive runs: all but `few`, or as long as
    others have what they have.
    """
    tests: dict[str, dict[str, pytest.Item]] = {}
    for item in items:
        marked = item.get_closest_marker("drawn") is not None
        if marked and item.get_closest_marker("exhaustive") is None:
            test, _, case = item.nodeid.partition("[")
            tests.setdefault(test, {})[case] = item
    for cases in tests.values():
        first = next(iter(cases.values())).get_closest_marker("drawn")
        few = first.kwargs.get("few") if first else None
        taken = (
            set(drawn_from(cases, few))
            if few
            else cover({case: _values(item) for case, item in cases.items()})
        )
        for case in cases.keys() - taken:
            cases[case].add_marker(pytest.mark.exhaustive)


def _values(item: pytest.Item) -> dict[str, Hashable]:
    """Return what a case has of each of its test's parametrisations, or of the parameters alone
    that its mark names.
    """
    params, drawn = item.callspec.params, item.get_closest_marker("drawn")  # type: ignore[attr-defined]
    if drawn is not None and drawn.args:
        return {name: repr(params[name]) for name in drawn.args}
    found: dict[str, Hashable] = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        # One object in all cases, which need not be hashable
        found[str(names)] = tuple(id(params[name.strip()]) for name in names)
    return found


def _lot(item: pytest.Item) -> tuple[str, str] | None:
    """Return the lot that a test belongs to and the model that it tests, None for a test that
    always runs.
    """
    if item.path.parent.name in DRAWN:
        return item.path.parent.name, item.path.stem
    call = getattr(item, "callspec", None)
    if item.path.stem not in DRAWN or call is None or "family" not in call.params:
        return None
    return item.path.stem, call.params["family"]


@pytest.fixture(scope="session")
def warm() -> Warm:
    """`python -m` without the seconds that its imports take."""
    from tests.support.warm import shared

    return shared()


@pytest.fixture(scope="module", autouse=True)
def programs_of_one_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """What commands and phases called here would start in a new interpreter, or from a process with
    imports of its own, is forked from the one of `warm`; `test_warm` sees how it is otherwise.
    """
    from onboard.workflow.phase import RunContext
    from onboard.workflow.processes import warm
    from onboard.workflow.processes.programs import in_new_interpreter
    from tests.support.warm import Asked

    start: Any = RunContext.__init__
    run_module, *others = start.__defaults__
    assert run_module is in_new_interpreter
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem != "test_warm":
            patch.setattr(warm, "NewServer", lambda module: Asked())
            patch.setattr(start, "__defaults__", (Asked(), *others))
        yield


@pytest.fixture(scope="module", autouse=True)
def little_to_look_through() -> None:
    """Keep the collector from what files before have imported, which stays: models hold reference
    cycles, so that it looks for garbage again and again.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def kept_graphs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Keep the graphs of `KEPT`, as a user's runs do, in all processes of a run; no run has those of
    another.
    """
    if KEPT.isdisjoint((request.path.stem, request.path.parent.name)):
        yield
        return
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONBOARD_CACHE", str(folder / "kept"))
        yield


def pytest_unconfigure() -> None:
    """End what tests were forked from."""
    if support := sys.modules.get("tests.support.warm"):
        support.end()
