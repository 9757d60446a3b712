"""Groups of two and four ranks, started when the first test asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[ranks.Group]:
    with ranks.started(2) as group:
        yield group


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[ranks.Group]:
    with ranks.started(4) as group:
        yield group
