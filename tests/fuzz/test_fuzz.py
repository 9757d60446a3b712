"""A few inputs of every kind; `python -m tests.fuzz --count 10000` draws as many."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.found import FOUND
from tests.fuzz.harness import check_words, explore, outcome
from tests.fuzz.kinds import KINDS, Kind

COUNTS = {"config": 6, "safetensors": 10, "index": 6, "tokenizer": 3, "spec": 5}
"""Of the kinds that take longer than the others."""


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_accepted_or_refused_in_one_line(name: str) -> None:
    number = random.randrange(2**31)
    print(f"seed {number}")
    ended = explore(name, COUNTS.get(name, 15), number)
    assert sum(ended.values()) > 0


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_stays_mended(what: str) -> None:
    name, files = FOUND[what]
    assert outcome(KINDS[name], files()).startswith("refused")


def wrong(place: Path) -> int:
    raise KeyError("x")


def writes_outside(place: Path) -> int:
    (place.parent / "outside-of-its-folder").write_text("x")
    (place.parent / "outside-of-its-folder").unlink()
    return 0


def writes_and_refuses(place: Path) -> int:
    (place / "root").mkdir()
    print("onboard: no")
    return 1


def says_much(place: Path) -> int:
    print("\n".join("onboard: no" for _ in range(9)))
    return 1


@pytest.mark.parametrize("ask", [wrong, writes_outside, writes_and_refuses, says_much])
def test_the_harness_sees_what_must_not_be(ask: object) -> None:
    with pytest.raises((AssertionError, KeyError)):
        outcome(Kind(lambda: None, ask), {"model/x": b"x"})  # type: ignore[arg-type]


@pytest.mark.parametrize("said", ["Traceback (most", "internal error: x", "no", "onboard: \x1b[2J"])
def test_words_that_must_not_be(said: str) -> None:
    with pytest.raises(AssertionError):
        check_words(1, said)
