from __future__ import annotations

import pytest
from families import config_dict

from onboard.analysis.analyze import analyze
from onboard.analysis.positions import first_position
from onboard.analysis.tiny import load_config
from onboard.codegen.model_file import generate_model_file
from onboard.errors import OnboardError


@pytest.mark.parametrize(("family", "value"), [("roberta", "pad_token_id + 1"), ("bert", None), ("llama", None)])
def test_where_positions_begin_is_probed(family: str, value: str | None) -> None:
    found = first_position(load_config({"model_type": family, "is_decoder": True}))
    assert (found.value if found else None) == value


def test_a_model_file_registers_where_positions_begin_and_takes_no_code_from_a_spec() -> None:
    spec = analyze({"model_type": "roberta", "is_decoder": True}, model="x")
    assert generate_model_file(spec).strip().endswith("first_position=lambda config: config.pad_token_id + 1)")
    spec.traits["first_position"] = spec.traits["first_position"].model_copy(update={"value": "pad_token_id + 1 + x()"})
    with pytest.raises(OnboardError, match="first_position"):
        generate_model_file(spec)
    spec = analyze(config_dict("llama"), model="x")
    assert "first_position" not in generate_model_file(spec)
