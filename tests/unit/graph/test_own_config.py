"""The config of a model with code of its own, as a run reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig

from onboard.graph import factory
from onboard.modeling import register_config
from onboard.plain_config import PlainConfig, add_old_defaults
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


@pytest.mark.parametrize("standalone", [False, True])
def test_a_type_that_the_codes_config_class_declares(tmp_path: Path, standalone: bool) -> None:
    register_config(BoundedConfig)
    classes = {"AutoConfig": "configuration_x.A", "AutoModelForCausalLM": "modeling_x.M"}
    text = json.dumps({"auto_map": classes, "limit": [0.5, 2.0]})
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    declared = 'class A:\n    model_type = "bounded_by_infinity"\n'
    (tmp_path / "configuration_x.py").write_text(declared, encoding="utf-8")
    read = loader.read_config(tmp_path) if standalone else factory.read_config(tmp_path, tmp_path)
    assert list(read.limit) == [0.5, 2.0]


def test_fields_may_be_set_behind_the_constructor_of_the_base() -> None:
    class Late(PretrainedConfig):  # type: ignore[misc]
        def __init__(self, positions: int = 99, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.max_position_embeddings = positions

    kind: dict[str, Any] = {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
    }
    kind |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
    with pytest.raises(AttributeError):
        Late(rope_parameters=dict(kind))
    add_old_defaults(Late)
    assert Late(rope_parameters=dict(kind)).rope_parameters["factor"] == 8.0
    del kind["factor"]
    with pytest.raises(KeyError):
        Late(rope_parameters=kind)
