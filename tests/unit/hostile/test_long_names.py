"""Names of files that no file system takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from onboard.analysis.repository_source import survey_code
from onboard.errors import OnboardError


def test_code_whose_name_is_too_long_is_refused_in_one_line(tmp_path: Path) -> None:
    config = {"auto_map": {"AutoConfig": f"{'c' * 5000}.A", "AutoModelForCausalLM": "m.B"}}
    with pytest.raises(OnboardError, match="cannot be read") as found:
        survey_code(tmp_path, config)
    assert len(str(found.value)) < 300
