"""The schema beside spec.yaml, by which an editor says what may be written."""

from __future__ import annotations

from typing import Any

from onboard.analysis.blocks.spec_records import Record
from onboard.analysis.spec import ModelSpec


class Held(Record):
    """A record with a config."""

    config: dict[str, Any]


def test_numbers_that_json_has_not_are_kept() -> None:
    config = {"time_step_limit": [0.0, float("inf")]}
    assert Held(config=config).model_dump(mode="json") == {"config": config}


def test_every_field_of_a_spec_is_explained() -> None:
    schema = ModelSpec.model_json_schema()
    parts: dict[str, Any] = {"ModelSpec": schema, **schema["$defs"]}
    blocks = {name: each for name, each in parts.items() if "class_name" in each["properties"]}
    assert len(blocks) > 10
    inherited = {"kind", "parameters"}  # each kind has its own, whose class says what they are
    for name in ("ModelSpec", "LayerKind", "Trait", "RepositoryCode", *blocks):
        fields = parts[name]["properties"]
        bare = {field for field, each in fields.items() if "description" not in each}
        assert bare <= (inherited if name in blocks else set()), (name, bare)
        assert parts[name]["description"]
