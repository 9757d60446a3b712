"""Values of a config or a spec stay data: they cannot become code of a generated file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from families import config_dict

from onboard.analysis.analyze import analyze
from onboard.codegen.model_file import generate_model_file
from onboard.errors import ConsentRequiredError, OnboardError

EVIL = '"); import os; os.system("touch {path}")#'


@pytest.mark.parametrize("key", ["model_type", "hidden_act", "architectures", "rope_parameters"])
def test_a_hostile_field_is_refused(key: str, tmp_path: Path) -> None:
    evil = EVIL.format(path=tmp_path / "owned")
    value = {"architectures": [evil], "rope_parameters": {"rope_type": evil, "rope_theta": 1e4}}.get(key, evil)
    with pytest.raises(OnboardError):
        generate_model_file(analyze({**config_dict("llama"), key: value}, model="x"))
    assert not (tmp_path / "owned").exists()


def test_hostile_extras_stay_out_of_the_file(tmp_path: Path) -> None:
    evil = EVIL.format(path=tmp_path / "owned")
    config = {**config_dict("llama"), evil: evil, "extra": evil, "_name_or_path": evil}
    spec = analyze(config, model=evil, revision=evil)
    text = generate_model_file(spec)
    assert evil not in text
    assert "os" not in {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("field", ["family", "architecture", "config_class", "hf_module"])
def test_a_hostile_spec_is_refused(field: str) -> None:
    spec = analyze(config_dict("llama"), model="x")
    setattr(spec, field, 'x"); import os #')
    with pytest.raises(OnboardError):
        generate_model_file(spec)


@pytest.mark.parametrize("key", ["eps", "weight", "bias"])
def test_a_hostile_block_is_refused(key: str) -> None:
    spec = analyze(config_dict("cohere"), model="x")
    block = next(item for item in spec.blocks if item.kind == "layernorm")
    block.parameters = {**block.parameters, key: "self.x; import os"}
    with pytest.raises(OnboardError, match="identifier"):
        generate_model_file(spec)


def test_remote_code_needs_consent() -> None:
    config = {"model_type": "their_model", "auto_map": {"AutoModelForCausalLM": "modeling.X"}}
    with pytest.raises(ConsentRequiredError, match="--trust-remote-code"):
        analyze(config, model="x")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "no_such_model"}, "no architecture 'no_such_model'"),
        ({"model_type": "vit"}, "vit is not a causal language model"),
        ({"model_type": None}, "not an identifier"),
        ({"model_type": "llama", "num_attention_heads": "many"}, "refuses this llama config"),
    ],
)
def test_what_is_no_causal_language_model_is_one_line(config: dict[str, object], message: str) -> None:
    with pytest.raises(OnboardError, match=message) as caught:
        analyze(config, model="x")
    assert "\n" not in str(caught.value)
