"""Scores that are masked in place, through a slice that is all of them, or is not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.odd_code import ATTENTION, GENERATE, run_apart, save_odd

_PLAIN = 'scores = scores.masked_fill(mask, float("-inf"))'
_FILLED = 'scores[:, :, CUT].masked_fill_(mask.view(1, 1, t, t), float("-inf"))'
_CUTS = {"odd_last": "-t:, -t:", "odd_first": ":t, :t"}
_ODD_ROWS = """
scores[:, :, -h:, -h:].masked_fill_(mask[-h:, -h:], float("-inf"))
scores = scores.masked_fill(mask, float("-inf"))
"""
"""Of some rows, before all are: a slice of another size is none of the whole."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what comes of the models."""
    folder = tmp_path_factory.mktemp("slices")
    bodies = {
        key: ATTENTION.replace(_PLAIN, _FILLED.replace("CUT", cut)) for key, cut in _CUTS.items()
    }
    bodies["odd_some"] = ATTENTION.replace(_PLAIN, f"h = t // 2 + 1\n{_ODD_ROWS.strip()}")
    return run_apart(
        GENERATE, [save_odd(folder / key, attention=body) for key, body in bodies.items()]
    )


@pytest.mark.parametrize("name", _CUTS)
def test_a_slice_of_all_scores_is_masked_as_they_are(name: str, made: dict[str, Any]) -> None:
    found = made[name]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert "torch_attention(" in found["text"]
    assert "masked_fill" not in found["text"]


def test_a_slice_of_some_scores_is_not_taken_for_all(made: dict[str, Any]) -> None:
    found = made["odd_some"]
    assert found.get("error") is None, found["error"]
    assert "scores[:, :, -h:, -h:].masked_fill_(" in found["text"]
