"""Every family end to end: analyze, generate, prove against transformers; one file serves all
variants.
"""

from __future__ import annotations

import ast
from functools import cache

import pytest

from onboard.analysis.analyze import analyze
from onboard.analysis.spec import ModelSpec
from onboard.codegen.model_file import generate_model_file
from onboard.verify.blocks import prove
from onboard.verify.tolerances import SAME
from tests.support.families import FAMILIES, VARIANTS, config_dict

MOST_LINES = {"llama": 210, "mistral": 210, "qwen2": 215, "olmo2": 220, "granite": 220}
LEFTOVERS = (
    "kwargs",
    "attention_dropout",
    "Dropout",
    "is_causal",
    "gradient_checkpointing",
    "num_key_value_groups",
    "padding_idx =",
    "past_key_values",
    "attention_mask",
    "use_cache",
    "repeat_kv",
    "position_ids=None",
)


@cache
def _spec(family: str, variant: str) -> ModelSpec:
    return analyze(config_dict(family, variant), model=f"test/{family}-{variant}")


@cache
def _text(family: str) -> str:
    return generate_model_file(_spec(family, next(iter(VARIANTS[family]))))


CASES = [(family, variant) for family, variants in VARIANTS.items() for variant in variants]


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_the_file_of_a_family_equals_transformers_in_every_variant(
    family: str, variant: str
) -> None:
    proofs = prove(_text(family), _spec(family, variant), export=False)
    assert len(proofs) > 10
    assert max(proof.error for proof in proofs) <= SAME
    assert proofs[-1].path == ""


@pytest.mark.parametrize(
    ("family", "variant"), [case for case in CASES if case[1] != next(iter(VARIANTS[case[0]]))]
)
def test_a_file_generated_from_another_variant_is_right_too(family: str, variant: str) -> None:
    spec = _spec(family, variant)
    prove(generate_model_file(spec), spec, export=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_export_with_dynamic_batch_and_sequence(family: str) -> None:
    prove(_text(family), _spec(family, next(iter(VARIANTS[family]))))


@pytest.mark.parametrize("family", FAMILIES)
def test_files_are_lean(family: str) -> None:
    text = _text(family)
    assert len(text.splitlines()) < MOST_LINES.get(family, 270)
    assert [word for word in LEFTOVERS if word in text] == []
    assert "torch.ops.onboard.torch_attention(" in text


@pytest.mark.parametrize("family", FAMILIES)
def test_every_attribute_that_is_set_is_read(family: str) -> None:
    for cls in [node for node in ast.parse(_text(family)).body if isinstance(node, ast.ClassDef)]:
        own = [node for node in ast.walk(cls) if isinstance(node, ast.Attribute)]
        own = [node for node in own if isinstance(node.value, ast.Name) and node.value.id == "self"]
        stored = {node.attr for node in own if isinstance(node.ctx, ast.Store)}
        loaded = {node.attr for node in own if isinstance(node.ctx, ast.Load)}
        assert stored - loaded <= {"weight"}, cls.name


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "starcoder2"])
def test_layer_norms_are_canonical_ops(family: str) -> None:
    assert "nn.LayerNorm(" not in _text(family)
    assert _text(family).count("torch_layernorm") == 1


def test_generation_is_deterministic() -> None:
    spec = _spec("gemma3_text", "4b")
    again = ModelSpec.from_yaml(spec.to_yaml())
    assert generate_model_file(spec) == generate_model_file(again) == _text("gemma3_text")


EXPECTED = {
    "llama": {
        "attention": "gqa",
        "norm": "rmsnorm",
        "rope": "llama3",
        "mlp": "gated",
        "activation": "silu",
    },
    "mistral": {"sliding_window": 4096},
    "gemma2": {"norm": "rmsnorm (1 + w)", "attention_softcap": 50.0, "logit_softcap": 30.0},
    "phi3": {"mlp": "gated, fused", "attention": "mha"},
    "gpt2": {"mlp": "plain", "activation": "gelu_new"},
    "starcoder2": {"mlp": "plain", "activation": "gelu_pytorch_tanh"},
    "cohere": {"position": "rope_with_complex_freqs", "norm": "layernorm"},
    "olmo2": {"position": "rope_with_explicit_cos_sin"},
}


@pytest.mark.parametrize("family", EXPECTED)
def test_traits(family: str) -> None:
    traits = _spec(family, next(iter(VARIANTS[family]))).traits
    assert {key: traits[key].value for key in EXPECTED[family]} == EXPECTED[family]
    assert all(trait.evidence for trait in traits.values())


def test_kinds_of_layers_are_those_of_the_whole_model() -> None:
    kinds = {kind.name: kind.layers for kind in _spec("smollm3", "window").layer_kinds}
    assert set(kinds) == {"full_attention", "sliding_attention_no_rope"}
    assert kinds["sliding_attention_no_rope"] == list(range(3, 36, 4))
    assert sum(map(len, kinds.values())) == 36
    assert [kind.name for kind in _spec("mistral", "window").layer_kinds] == ["sliding_attention"]
    assert [kind.name for kind in _spec("mistral", "full").layer_kinds] == ["full_attention"]
