"""The config of a model with code of its own, as a run reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from onboard.graph import factory
from onboard.modeling import register_config
from onboard.plain_config import PlainConfig
from onboard.standalone import loader


class BoundedConfig(PlainConfig):
    """A config with a pair of numbers."""

    model_type = "bounded_by_infinity"

    def __init__(self, limit: tuple[float, float] = (0.0, 1.0), **kwargs: object) -> None:
        self.limit = limit
        super().__init__(**kwargs)


@pytest.mark.parametrize("standalone", [False, True])
def test_floats_that_json_has_not_are_floats(tmp_path: Path, standalone: bool) -> None:
    register_config(BoundedConfig)
    BoundedConfig(limit=(-1.0, float("inf"))).save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text(encoding="utf-8")
    read = loader.read_config(tmp_path) if standalone else factory.read_config(tmp_path, tmp_path)
    assert list(read.limit) == [-1.0, float("inf")]
