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


_KEEPING = """
mid = x + self.attn(self.norm1(x), position_ids)
x = mid + self.mlp(self.norm2(mid))
return x, {"mid": mid, "end": x}
"""
_GATHERED = """
x = self.embed(input_ids)
kept = []
for layer in self.layers:
    x, own = layer(x, position_ids)
    kept.append(own)
kept = {key: torch.stack([own[key] for own in kept]) for key in kept[0]}
x = self.norm(x)
kept["last"] = x
return x, kept
"""
_GIVEN = "return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids, position_ids)))"
_BESIDE = """x, kept = self.model(input_ids, position_ids)
        return CausalLMOutputWithPast(logits=self.lm_head(x)), kept"""


def test_what_layers_keep_may_be_given_beside_an_output_of_transformers(tmp_path: Path) -> None:
    folder = save_odd(tmp_path / "odd_kept", block=_KEEPING, model=_GATHERED)
    file = folder / "modeling_odd.py"
    file.write_text(file.read_text().replace(_GIVEN, _BESIDE))
    found = run_apart(GENERATE, [folder])["odd_kept"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert found["recorded"] == []
    said = (
        "OddForCausalLM.forward gives its logits as a tuple or dict, [0]; they are taken from there"
    )
    assert said in found["facts"]
