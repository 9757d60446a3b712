from __future__ import annotations

from collections.abc import Iterator

import pytest
from warm import Warm


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """`python -m` without the seconds that its imports take."""
    process = Warm(tmp_path_factory.mktemp("warm"))
    yield process
    process.close()
