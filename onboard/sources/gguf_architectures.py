"""The architectures that are read from GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

_FILE = Path(__file__).resolve().parents[1] / "assets" / "gguf.yaml"


@dataclass(frozen=True)
class Architecture:
    """What is to be known of one; `assets/gguf.yaml` says what the fields mean."""

    model_type: str | None = None
    rows_in_pairs: bool = False
    norms_plus_one: bool = False
    no_mixtures: bool = False
    attention_bias: bool = False


@cache
def architectures() -> Mapping[str, Architecture]:
    """Return them by the format's names."""
    values = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return {name: Architecture(**fields) for name, fields in values.items()}
