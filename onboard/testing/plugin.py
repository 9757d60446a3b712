"""Pytest plugin (`-p onboard.testing.plugin`): writes the results of equivalence tests as JSON.

`--onboard-results FILE` gets a list of {name, level, block, device, status, error, tolerance,
rounding, seconds, message}; `rounding` has both errors against float64 (`ours`, `theirs`), where
the error is beyond the tolerance and they are known.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from onboard.testing.compare import MEASUREMENTS, NOTES

_MESSAGE_LINES = 6  # PyTorch's errors go on with the frames of its C++ code


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare where the results go."""
    parser.addoption(
        "--onboard-results", type=Path, default=None, help="write the results as JSON to this file"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker of generated tests and collect results when a file for them was named."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    if path := config.getoption("--onboard-results"):
        config.pluginmanager.register(Results(path))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the test that pytest makes of an empty list: a model whose layers are all PyTorch's
    own has none of its own to test.
    """
    items[:] = [item for item in items if "NOTSET" not in item.name]


class Results:
    """The results of one session."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Function) -> Any:
        """Take each test's outcome, and what it measured."""
        report: pytest.TestReport = yield
        row = self.rows.setdefault(item.nodeid, _row(item))
        row["seconds"] = round(row["seconds"] + report.duration, 4)
        if report.when == "call" or report.outcome != "passed":
            row["status"] = report.outcome
            row["message"] = _message(report)
        if report.when == "call":
            row |= _worst_measurement()
            notes = [told for name, told in report.user_properties if name == "note" and told]
            row["message"] = row["message"] or "; ".join(map(str, (*notes, *NOTES)))
            NOTES.clear()
        return report

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        self.path.write_text(json.dumps(list(self.rows.values()), indent=2), encoding="utf-8")


def _row(item: pytest.Function) -> dict[str, Any]:
    """A test's row before it ran; `path` and `pair` are the parameters of generated tests."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return {
        "name": item.name,
        "level": (item.originalname or item.name).removeprefix("test_"),
        "block": str(parameters.get("path", "")),
        "device": str(parameters.get("pair", "cpu")),
        "status": "passed",
        "error": None,
        "tolerance": None,
        "rounding": None,
        "seconds": 0.0,
        "message": "",
    }


def _message(report: pytest.TestReport) -> str:
    """What a test failed with or was skipped for; the first lines of a long story."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message) if crash else str(report.longrepr or "")
    return "\n".join(text.splitlines()[:_MESSAGE_LINES])


def _worst_measurement() -> dict[str, Any]:
    """The comparison that came nearest to its limit, or went furthest past it, since the last
    call.
    """
    measured = list(MEASUREMENTS)
    MEASUREMENTS.clear()
    if not measured:
        return {}
    # A NaN compares with nothing, so it is put on top by hand; JSON has no NaN.
    worst = max(
        measured, key=lambda m: m.error / m.tolerance if math.isfinite(m.error) else math.inf
    )
    return {
        "error": worst.error if math.isfinite(worst.error) else None,
        "tolerance": worst.tolerance,
        "rounding": asdict(worst.rounding) if worst.rounding else None,
    }
