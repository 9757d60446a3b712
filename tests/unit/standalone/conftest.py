from __future__ import annotations

import pytest

from tests.support.standalone.cases import MODELS, Case, make_cases


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Case]:
    return make_cases(tmp_path_factory.mktemp("exports"), MODELS)
