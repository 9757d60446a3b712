"""Values of a config or a spec stay data: they cannot become code of a generated file."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from onboard.analysis.analyze import analyze
from onboard.analysis.spec import ModelSpec
from onboard.analysis.spec_blocks import Block
from onboard.codegen.model_file import generate_model_file
from onboard.errors import ConsentRequiredError, OnboardError
from tests.support.families import config_dict
from tests.unit.spec_samples import edited

EVIL = '"); import os; os.system("touch {path}")#'


@pytest.mark.parametrize("key", ["model_type", "hidden_act", "architectures", "rope_parameters"])
def test_a_hostile_field_is_refused(key: str, tmp_path: Path) -> None:
    evil = EVIL.format(path=tmp_path / "owned")
    value = {
        "architectures": [evil],
        "rope_parameters": {"rope_type": evil, "rope_theta": 1e4},
    }.get(key, evil)
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
    text = re.sub(
        rf"^{field}: .*$", f"{field}: 'x\"); import os #'", spec.to_yaml(), flags=re.MULTILINE
    )
    with pytest.raises(OnboardError, match="where an identifier belongs"):
        ModelSpec.from_yaml(text)
    with pytest.raises(ValidationError, match="where an identifier belongs"):
        setattr(spec, field, 'x"); import os #')


@pytest.mark.parametrize("key", ["eps", "weight", "bias"])
def test_a_hostile_block_is_refused(key: str) -> None:
    spec = analyze(config_dict("cohere"), model="x")
    with pytest.raises(OnboardError, match="where an identifier belongs"):
        ModelSpec.from_yaml(edited(spec, "layernorm", **{key: "self.x; import os"}))
    block = next(item for item in spec.blocks if item.kind == "layernorm")
    with pytest.raises(ValidationError, match="where an identifier belongs"):
        setattr(block.parameters, key, "self.x; import os")


@pytest.mark.parametrize("kind", [block.__name__ for block in get_args(get_args(Block)[0])])
def test_no_text_of_a_block_is_free_to_be_code(kind: str) -> None:
    """Texts that templates put into code are names, or one of a few; an activation is written as a
    literal.
    """
    schema = TypeAdapter(Block).json_schema()["$defs"]
    own = schema[kind]["properties"]["parameters"]
    free = [key for key, field in _fields(own, schema) if _is_free(field, schema)]
    assert free == (["activation"] if kind == "Mlp" else [])


def _fields(schema: dict[str, Any], known: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found = known[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    return list(found.get("properties", {}).items())


def _is_free(field: dict[str, Any], known: dict[str, Any]) -> bool:
    """Whether some text may stand in a field that has no pattern and is not one of a few, or in one
    of its own fields.
    """
    if "$ref" in field:
        return any(_is_free(part, known) for _, part in _fields(field, known))
    parts = [*field.get("anyOf", []), *([field["items"]] if "items" in field else [])]
    parts += field.get("patternProperties", {}).values()
    if parts:
        return any(_is_free(part, known) for part in parts)
    assert field.keys() & {"type", "enum", "const"}, field
    return field.get("type") in (None, "string", "object", "array") and not field.keys() & {
        "pattern",
        "enum",
        "const",
    }


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
def test_what_is_no_causal_language_model_is_one_line(
    config: dict[str, object], message: str
) -> None:
    with pytest.raises(OnboardError, match=message) as caught:
        analyze(config, model="x")
    assert "\n" not in str(caught.value)
