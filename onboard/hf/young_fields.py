"""Fields that a config class has in the installed transformers and not in every release that is
supported.

A model file is read with other releases than the one it was generated with. Where it reads such a
field it has the class's default, which is what modeling code of earlier releases has as a constant.
"""

from __future__ import annotations

import dataclasses
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import transformers
import yaml
from transformers import PreTrainedConfig

YOUNG_FIELDS = Path(__file__).resolve().parents[1] / "assets" / "young_fields.yaml"
"""The two releases, and their config classes with such fields; `scripts/young_fields.py` writes it."""


def young_default(config: PreTrainedConfig, name: str) -> Any:
    """Return the default of a field that configs of this class may lack in another release; None
    for any other field.
    """
    listed = _young_fields().get(type(config).__name__, ())
    return plain_default(type(config), name) if name in listed else None


def without_ignored(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a config without the young fields that its class lacks here, and warn about each:
    transformers' own code of this release has constants in their place.
    """
    given, known = vars(config), _fields(type(config))
    for name in _young_fields().get(type(config).__name__, ()):
        if name in given and name not in known:
            warnings.warn(
                f"transformers {transformers.__version__} ignores {name} of {type(config).__name__}:"
                " compared with the constant in its code",
                stacklevel=2,
            )
            del given[name]
    return config


def plain_default(cls: type[PreTrainedConfig], name: str) -> Any:
    """Return the number or word that a class gives a field by default; None where it gives none."""
    found = _fields(cls).get(name)
    return found if isinstance(found, bool | int | float | str) else None


def _fields(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the defaults of a class's fields by their names."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return {field.name: field.default for field in fields}


@cache
def _young_fields() -> dict[str, list[str]]:
    found: dict[str, list[str]] = yaml.safe_load(YOUNG_FIELDS.read_text(encoding="utf-8"))["fields"]
    return found
