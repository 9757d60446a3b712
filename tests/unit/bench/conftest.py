from __future__ import annotations

import pytest

from tests.support.runtime.tiny import Tiny, make_tiny


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("llama"))
