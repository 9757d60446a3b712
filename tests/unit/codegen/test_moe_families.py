"""Mixtures of experts end to end: analyze, generate, prove against transformers; one file serves
all variants.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import AutoConfig, MixtralConfig

from onboard.analysis.analyze import analyze
from onboard.analysis.spec import ModelSpec
from onboard.analysis.tiny.tiny_config import tiny_config
from onboard.analysis.tiny.tiny_model import build_tiny
from onboard.codegen.equivalence_test import generate_test_file
from onboard.codegen.model_file import generate_model_file
from onboard.errors import OnboardError
from onboard.hf.expert_weights import separate_experts
from onboard.verify.blocks import prove
from onboard.verify.tolerances import SAME
from tests.support.moe_families import VARIANTS, config_dict
from tests.unit.spec_samples import edited


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
    assert max(proof.error for proof in proofs) <= SAME
    assert any(proof.class_name.endswith("Experts") for proof in proofs)
    assert proofs[-1].path == ""


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "glm4_moe", "granitemoe"])
def test_export_with_dynamic_batch_and_sequence(family: str) -> None:
    prove(_text(family), _spec(family, next(iter(VARIANTS[family]))))


@pytest.mark.parametrize("family", VARIANTS)
def test_experts_are_one_op(family: str) -> None:
    text = _text(family)
    assert text.count("torch.ops.onboard.torch_moe(") == 1
    assert [word for word in ("one_hot", "index_add_", "aux_loss") if word in text] == []
    assert len(text.splitlines()) < 340


@pytest.mark.parametrize(
    ("family", "right", "wrong", "block"),
    [
        ("mixtral", "expert.w3.weight for", "expert.w1.weight for", "layers.0.mlp.experts"),
        ("mixtral", "act_fn=self.act_fn", 'act_fn="gelu"', "layers.0.mlp.experts"),
        ("qwen3_moe", "top_k_weights, w1", "top_k_weights * 1.01, w1", "layers.0.mlp.experts"),
        ("glm4_moe", "* self.routed_scaling_factor", "* 1.3", "layers.1.mlp"),
        ("granitemoe", "gate, up = self", "up, gate = self", "layers.0.block_sparse_moe.experts"),
    ],
)
def test_a_wrong_file_fails_at_the_wrong_block(
    family: str, right: str, wrong: str, block: str
) -> None:
    assert right in _text(family)
    spec = _spec(family, next(iter(VARIANTS[family])))
    with pytest.raises(OnboardError, match=rf"{block}.* differs from transformers"):
        prove(_text(family).replace(right, wrong), spec, export=False)


def test_names_are_those_that_checkpoints_have() -> None:
    weights = separate_experts(build_tiny(MixtralConfig()))
    assert weights["model.layers.0.mlp.experts.3.w1.weight"].shape == (96, 64)
    assert weights["model.layers.0.mlp.experts.3.w2.weight"].shape == (64, 96)
    assert not any("gate_up_proj" in name for name in weights)


def test_separating_experts_keeps_the_values() -> None:
    model = build_tiny(MixtralConfig(), seed=3)
    stack = model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    weights = separate_experts(model)
    parts = [weights[f"model.layers.1.mlp.experts.5.{leaf}.weight"] for leaf in ("w1", "w3")]
    assert torch.equal(torch.cat(parts), stack[5])
    assert "_weight_conversions" not in vars(model) or model._weight_conversions is None


def test_layers_that_are_mixtures_are_a_kind_of_their_own_beside_dense_ones() -> None:
    kinds = {kind.name: kind.layers for kind in _spec("glm4_moe", "air").layer_kinds}
    assert kinds == {"full_attention": [0], "full_attention_moe": list(range(1, 46))}
    assert [kind.name for kind in _spec("mixtral", "8x7b").layer_kinds] == ["full_attention"]
    assert '"model.layers.1.mlp.experts"' in generate_test_file(_spec("glm4_moe", "air"))


def test_small_configs_have_few_experts_in_few_groups() -> None:
    config = AutoConfig.for_model(**config_dict("glm4_moe", "groups"))
    small = tiny_config(config)
    found = (small.n_routed_experts, small.num_experts_per_tok, small.n_group, small.topk_group)
    assert found == (16, 4, 4, 2)
    assert small.first_k_dense_replace == 1


def test_a_spec_cannot_smuggle_code_in() -> None:
    text = edited(_spec("mixtral", "8x7b"), "experts", gate="w1 + evil()")
    with pytest.raises(OnboardError, match="where an identifier belongs"):
        ModelSpec.from_yaml(text)
