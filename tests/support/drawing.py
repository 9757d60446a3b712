"""Which of many like cases a run of the tests takes: some always, a few by chance, and all where
`exhaustive` runs.
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection

import pytest
from _pytest.mark import ParameterSet


def drawn_from(cases: Collection[str], count: int) -> list[str]:
    """Return `count` of `cases`, or all if they are fewer; the processes of one run draw alike."""
    draw = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))
    return draw.sample(sorted(cases), min(count, len(cases)))


def some_of(cases: Collection[str], always: Collection[str], by_chance: int) -> list[ParameterSet]:
    """Return `cases` as parameters; those that are in `always` and `by_chance` others are not
    marked exhaustive.

    The processes of one run draw alike, by that run's own number; their tests' names say what was
    drawn.
    """
    assert set(always) <= set(cases)
    drawn = drawn_from(set(cases) - set(always), by_chance)
    return [
        pytest.param(
            case, id=case, marks=() if case in always or case in drawn else pytest.mark.exhaustive
        )
        for case in cases
    ]
