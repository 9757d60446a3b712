"""What repositories' layers and models give back: tuples of one part, outputs with fields set later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.odd_code import GENERATE, run_apart, save_odd

_HEAD = "from transformers.modeling_outputs import BaseModelOutputWithPast"
_LATER = """
x = self.embed(input_ids)
for layer in self.layers:
    x = layer(x, position_ids)
output = BaseModelOutputWithPast(last_hidden_state=self.norm(x))
if x.shape[1] > 7:
    output.extra = x * 2
return output.last_hidden_state
"""
_IN_A_TUPLE = """
x = self.embed(input_ids)
losses = []
for layer in self.layers:
    outputs = (layer(x, position_ids),)
    x = outputs[0]
    if len(outputs) > 1:
        losses.append(outputs[-1])
loss = sum(losses) if losses else None
output = BaseModelOutputWithPast(last_hidden_state=self.norm(x))
if loss is not None:
    output.loss = loss
return output.last_hidden_state
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("outputs")
    bodies = {"odd_later": _LATER, "odd_tuple": _IN_A_TUPLE}
    return run_apart(
        GENERATE,
        [save_odd(folder / name, head=_HEAD, model=body) for name, body in bodies.items()],
    )


@pytest.mark.parametrize("name", ["odd_later", "odd_tuple"])
def test_is_generated(found: dict[str, Any], name: str) -> None:
    assert found[name].get("error") is None, found[name]["error"]
    assert found[name]["worst"] < 1e-5
    assert found[name]["recorded"] == []


def test_a_layer_whose_result_a_tuple_has_is_called_once(found: dict[str, Any]) -> None:
    assert found["odd_tuple"]["text"].count("= layer(") == 1
    assert "losses" not in found["odd_tuple"]["text"]
