from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.runtime.tiny import Tiny, make_tiny


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Tiny]:
    return lambda *args, **options: make_tiny(tmp_path, *args, **options)
