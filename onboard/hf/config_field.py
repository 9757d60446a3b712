"""One way to read a field of a config that may have no value for all layers."""

from __future__ import annotations

from typing import Any


def config_field(config: Any, name: str, otherwise: Any = None) -> Any:
    """Return a field of a config; `otherwise` where it has none, or none for all layers.

    transformers refuses, with an error of its own, to read a field that differs from layer to
    layer; a property of a repository's config may fail with any.
    """
    try:
        return getattr(config, name, otherwise)
    except Exception:
        return otherwise
