"""What lets a test pass whose error is beyond its limit."""

from __future__ import annotations

from typing import Any


def rounded(row: dict[str, Any]) -> str:
    """Return both errors against float64 of a test's row, as the end of a phrase; empty where the
    limit alone judged.
    """
    if (own := row.get("rounding")) is None:
        return ""
    return f", or rounding: against float64 {own['ours']:.1e}, the reference's own float32 {own['theirs']:.1e}"
