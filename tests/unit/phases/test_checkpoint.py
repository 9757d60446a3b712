from __future__ import annotations

from typing import Any

import pytest

from onboard.analysis.spec import LayerKind
from onboard.workflow.checkpoint.checkpoint_size import layer_kinds, max_positions
from tests.support.phases import make_spec


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"model_type": "gpt2", "n_positions": 77}, 77),
        ({"model_type": "gpt2"}, 1024),
        ({"model_type": "llama", "max_position_embeddings": 99}, 99),
        ({"model_type": "bloom"}, None),
        ({"model_type": "mamba2", "time_step_limit": [0.0, {"__float__": "Infinity"}]}, None),
        ({"model_type": "made_up", "max_position_embeddings": 55}, 55),
        ({"model_type": "made_up"}, None),
    ],
)
def test_positions_come_from_the_config_class(
    config: dict[str, object], positions: int | None
) -> None:
    assert max_positions(config) == positions


def _kinds(shown: dict[str, list[int]], **config: Any) -> dict[str, list[int]]:
    kinds = [LayerKind(name=name, layers=layers, path="x.0") for name, layers in shown.items()]
    spec = make_spec("org/x", layer_kinds=kinds)
    return {
        kind.name: kind.layers for kind in layer_kinds(spec.model_copy(update={"config": config}))
    }


def test_a_spec_that_shows_the_first_layers_is_completed() -> None:
    assert _kinds({"full": [0, 1]}, model_type="gpt2", n_layer=5) == {"full": [0, 1, 2, 3, 4]}


def test_kinds_come_from_the_lists_of_the_config() -> None:
    types = ["sliding_attention"] * 3 + ["full_attention", "sliding_attention"]
    config = {"model_type": "gemma3_text", "num_hidden_layers": 5, "layer_types": types}
    found = _kinds({"sliding_attention": [0], "full_attention": [1]}, **config)
    assert found == {"sliding_attention": [0, 1, 2, 4], "full_attention": [3]}


def test_without_lists_the_first_layers_are_a_period() -> None:
    assert _kinds({"a": [0, 1], "b": [2]}, model_type="made_up", num_hidden_layers=7) == {
        "a": [0, 1, 3, 4, 6],
        "b": [2, 5],
    }


def test_a_complete_spec_stays() -> None:
    assert _kinds({"a": [0, 2], "b": [1]}, model_type="llama", num_hidden_layers=3) == {
        "a": [0, 2],
        "b": [1],
    }
