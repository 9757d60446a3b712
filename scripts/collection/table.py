"""What is known of each model of the collection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[1] / "remote_collection.py"


def table() -> dict[str, dict[str, Any]]:
    """Return what is known of each model of the collection."""
    import yaml

    return dict(yaml.safe_load(SCRIPT.with_suffix(".yaml").read_text(encoding="utf-8")))
