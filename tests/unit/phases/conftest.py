"""A run's context, as the phases before would have left it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onboard.workflow.phase import RunContext
from tests.support.phases import ContextFactory, make_context


@pytest.fixture
def context_for(tmp_path: Path) -> ContextFactory:
    def make(model: str, **changes: Any) -> RunContext:
        return make_context(tmp_path / "root", model, **changes)

    return make
