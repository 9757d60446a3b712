"""Floats that JSON has not, as transformers writes them into config.json."""

from __future__ import annotations

from typing import Any

_NOT_JSON = ("Infinity", "-Infinity", "NaN")


def json_floats(value: Any) -> Any:
    """Return a JSON value with those floats in the place of `{"__float__": "NaN"}`."""
    if isinstance(value, dict):
        only = value.get("__float__") if len(value) == 1 else None
        return (
            float(only)
            if only in _NOT_JSON
            else {key: json_floats(item) for key, item in value.items()}
        )
    return [json_floats(item) for item in value] if isinstance(value, list) else value
