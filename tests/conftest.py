"""Puts this folder on the import path: `checkpoints` and `hub_server` are shared by the tests below it.

Graphs are kept by no test that does not ask for it: each sees the transforms at work.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from warm import Warm

os.environ["ONBOARD_CACHE"] = ""
# A job in the background ignores interrupts, and so would every process that the tests start and then interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


SHIPPED = 10
"""Of so many of the shipped models a run takes the generated tests."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the tests of the other shipped models to runs of all that is marked exhaustive."""
    from drawing import drawn_from

    shipped = [item for item in items if item.path.parent.name == "equivalence"]
    drawn = drawn_from({item.path.name for item in shipped}, SHIPPED)
    for item in shipped:
        if item.path.name not in drawn:
            item.add_marker(pytest.mark.exhaustive)


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """`python -m` without the seconds that its imports take."""
    from warm import started

    with started() as process:
        yield process
