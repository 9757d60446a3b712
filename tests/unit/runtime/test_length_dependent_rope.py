from transformers import AutoConfig

from onboard.runtime.length_dependent_rope import LengthDependentRope, length_dependent_rope
from tests.support.runtime.tiny import TINY


def _config(**rope: object) -> dict[str, object]:
    parameters = {"rope_theta": 10000.0, **rope}
    return AutoConfig.for_model("llama", **{**TINY, "rope_parameters": parameters}).to_dict()


def test_only_longrope_depends_on_the_length() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    longrope = _config(rope_type="longrope", original_max_position_embeddings=16, **factors)
    assert length_dependent_rope(longrope) == LengthDependentRope(16)
    for other in (
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
    ):
        assert length_dependent_rope(_config(**other)) is None


def test_a_table_nested_by_layer_kind_is_found() -> None:
    kinds = {
        "full": {"rope_type": "longrope", "original_max_position_embeddings": 7},
        "window": {"rope_type": "default"},
    }
    assert length_dependent_rope(
        {"rope_parameters": kinds, "max_position_embeddings": 99}
    ) == LengthDependentRope(7)


def test_the_table_is_that_of_the_length() -> None:
    assert [LengthDependentRope(10).table(length) for length in (1, 10, 11, 15)] == [0, 0, 11, 11]
