"""What a run of the tests draws: inputs, by each test's own name, and which of many like cases it
takes: some always, a few by chance, and all where `exhaustive` runs.
"""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
from _pytest.mark import ParameterSet

DRAW = "ONBOARD_DRAW"
"""Environment variable: the word that all of a run's draws follow from. A run that was given none
takes a fresh one, and names it.
"""


def name_the_draw() -> str:
    """Return the word of this run; its processes inherit it."""
    return os.environ.setdefault(DRAW, secrets.token_hex(4))


def draw_for(name: str) -> None:
    """Let what is drawn from now on, by child processes, too, follow from the run's word and from
    `name` alone: not from what has run before, nor in which process.
    """
    random.seed(f"{os.environ[DRAW]} {name}")
    torch.manual_seed(random.getrandbits(63))
    os.environ["ONBOARD_SEED"] = str(random.randrange(2**31))


@contextmanager
def drawing_for(name: str) -> Iterator[None]:
    """`draw_for` within the context, and then as before."""
    state, tensors, seed = random.getstate(), torch.get_rng_state(), os.environ["ONBOARD_SEED"]
    draw_for(name)
    try:
        yield
    finally:
        random.setstate(state)
        torch.set_rng_state(tensors)
        os.environ["ONBOARD_SEED"] = seed


def drawn_from(cases: Collection[str], count: int) -> list[str]:
    """Return `count` of `cases`, or all if they are fewer; the processes of one run draw alike."""
    draw = random.Random(os.environ[DRAW])
    return draw.sample(sorted(cases), min(count, len(cases)))


def cover(cases: Mapping[str, Mapping[str, Hashable]]) -> set[str]:
    """Return a few of `cases`, known by what each has of every parameter, in which whatever a
    parameter has in any of them occurs; the processes of one run draw alike.
    """
    draw = random.Random(os.environ[DRAW])
    left = draw.sample(sorted(cases), len(cases))
    missing = {has for each in cases.values() for has in each.items()}
    chosen: set[str] = set()
    while missing:
        best = max(left, key=lambda case: len(missing & cases[case].items()))
        chosen.add(best)
        missing -= cases[best].items()
    return chosen


def some_of(cases: Collection[str], always: Collection[str], by_chance: int) -> list[ParameterSet]:
    """Return `cases` as parameters; those that are in `always` and `by_chance` others are not
    marked exhaustive.

    The processes of one run draw alike; their tests' names say what was drawn.
    """
    assert set(always) <= set(cases)
    drawn = drawn_from(set(cases) - set(always), by_chance)
    return [
        pytest.param(
            case, id=case, marks=() if case in always or case in drawn else pytest.mark.exhaustive
        )
        for case in cases
    ]


def asked_for(request: pytest.FixtureRequest, parameter: str) -> list[str]:
    """Return what `parameter` is in the cases that this run takes of a fixture's file: nothing else
    need be made for them.
    """
    calls = (
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    )
    return list(dict.fromkeys(call[parameter] for call in calls if parameter in call))
