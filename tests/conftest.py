"""Puts this folder on the import path: `checkpoints` and `hub_server` are shared by the tests below it.

Graphs are kept by no test that does not ask for it: each sees the transforms at work.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from warm import Warm

os.environ["ONBOARD_CACHE"] = ""


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """`python -m` without the seconds that its imports take."""
    from warm import started

    with started() as process:
        yield process
