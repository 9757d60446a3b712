"""Latent attention and recurrent mixers end to end: analyze, generate, prove against
transformers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from onboard.analysis.analyze import analyze
from onboard.analysis.spec import ModelSpec
from onboard.codegen.model_file import generate_model_file
from onboard.errors import OnboardError
from onboard.verify.blocks import prove
from onboard.verify.tolerances import SAME
from tests.unit.spec_samples import edited

CONV, SSM, SELECTIVE, DELTA = (
    "torch_causal_conv1d",
    "torch_ssm",
    "torch_selective_scan",
    "torch_gated_delta_rule",
)
GATED, ATTENTION, MLA, MLSTM = "torch_rmsnorm_gated", "torch_attention", "torch_mla", "torch_mlstm"
_LFM2_KINDS = ["conv", "conv", "full_attention", "conv"]

FAMILIES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "minicpm3": ({}, {MLA}),
    "youtu": ({}, {MLA}),
    "mamba2": ({}, {CONV, SSM, GATED}),
    "mamba": ({}, {CONV, SELECTIVE}),
    "falcon_mamba": ({}, {CONV, SELECTIVE}),
    "lfm2": ({"layer_types": _LFM2_KINDS, "num_hidden_layers": 4}, {CONV, ATTENTION}),
    "qwen3_5_text": ({}, {CONV, DELTA, GATED, ATTENTION}),
    "olmo_hybrid": ({}, {CONV, DELTA, GATED, ATTENTION}),
    "bamba": ({"attn_layer_indices": [1, 5]}, {CONV, SSM, GATED, ATTENTION}),
    "granitemoehybrid": (
        {"layer_types": ["linear_attention", "full_attention"] * 16},
        {CONV, SSM, GATED, ATTENTION},
    ),
    "falcon_h1": ({"ssm_multipliers": [1.5, 0.5, 0.7, 1.2, 2.0]}, {CONV, SSM, ATTENTION}),
    "deepseek_v3": ({}, {MLA}),
    "qwen3_next": ({}, {CONV, DELTA, GATED, ATTENTION}),
    "nemotron_h": (
        {"layers_block_type": ["mamba", "mlp", "attention"]},
        {CONV, SSM, GATED, ATTENTION},
    ),
    "nemotron_h with experts": (
        {"model_type": "nemotron_h", "layers_block_type": ["mamba", "moe", "attention", "moe"]},
        {CONV, SSM, GATED, ATTENTION},
    ),
    "nemotron_h without states": (
        {"model_type": "nemotron_h", "layers_block_type": ["attention", "moe"]},
        {ATTENTION},
    ),
    "nemotron_h without attention": (
        {"model_type": "nemotron_h", "layers_block_type": ["mamba", "moe", "mlp"]},
        {CONV, SSM, GATED},
    ),
    "xlstm": ({}, {MLSTM}),
    "zamba2": ({"num_mem_blocks": 2}, {CONV, SSM, GATED, ATTENTION}),  # blocks shared in turn
}
"""Family -> config fields that differ from the class's defaults, canonical ops of its mixers."""
MIXERS = {CONV, SSM, SELECTIVE, DELTA, GATED, ATTENTION, MLA, MLSTM}


@cache
def _generated(family: str) -> tuple[ModelSpec, str]:
    spec = analyze({"model_type": family, **FAMILIES[family][0]}, model=f"test/{family}")
    return spec, generate_model_file(spec)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_file_of_a_family_equals_transformers_and_exports(family: str) -> None:
    spec, text = _generated(family)
    proofs = prove(text, spec)
    assert proofs[-1].path == ""
    assert max(proof.error for proof in proofs) <= SAME


@pytest.mark.parametrize("family", FAMILIES)
def test_mixers_are_canonical_ops(family: str) -> None:
    _, text = _generated(family)
    assert {op for op in MIXERS if f".{op}(" in text} == FAMILIES[family][1]
    assert [
        word
        for word in ("cumsum", "conv1d_fn", "cache_params", "expand_kv", "kv_b_proj(")
        if word in text
    ] == []
    assert len(text.splitlines()) < 450


def test_how_many_blocks_are_shared_in_turn_is_read_from_the_config() -> None:
    _, text = _generated("zamba2")
    assert "tie_weights(block, shared[index % config.num_mem_blocks])" in text
    assert "not covered: 0" not in text  # of the list of blocks, while it was empty


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("minicpm3", {"q_lora_rank": None}),
        (
            "mamba2",
            {
                "time_step_limit": [0.5, 1.0],
                "n_groups": 1,
                "use_conv_bias": False,
                "use_bias": True,
            },
        ),
        ("mamba", {"use_conv_bias": False, "use_bias": True}),
        ("lfm2", {"conv_bias": True}),
        ("olmo_hybrid", {"linear_allow_neg_eigval": False}),
        ("xlstm", {"eps": 0.05, "gate_soft_cap": 3.0}),
    ],
)
def test_one_file_serves_other_settings(family: str, fields: dict[str, Any]) -> None:
    _, text = _generated(family)
    spec = analyze({"model_type": family, **FAMILIES[family][0], **fields}, model=f"test/{family}")
    prove(text, spec, export=False)
    prove(generate_model_file(spec), spec, export=False)


@pytest.mark.parametrize(
    ("family", "right", "wrong", "block"),
    [
        ("youtu", "qk_head_dim**-0.5", "qk_head_dim**-0.45", "layers.0.self_attn"),
        (
            "minicpm3",
            "q_pass, q_rot, k_pass, k_rot",
            "q_pass, q_rot, 2 * k_pass, k_rot",
            "layers.0.self_attn",
        ),
        ("mamba2", "self.time_step_limit,\n", "[0.0, 0.1],\n", "layers.0.mixer"),
        ("mamba2", "self.A_log.float()", "self.A_log.float() * 1.001", "layers.0.mixer"),
        ("falcon_mamba", "self.D.float(),", "None,", "layers.0.mixer"),
        ("lfm2", "return self.out_proj(y)", "return self.out_proj(y.flip(1))", "layers.0.conv"),
        (
            "qwen3_5_text",
            "use_qk_l2norm_in_kernel=True",
            "use_qk_l2norm_in_kernel=False",
            "layers.0.linear_attn",
        ),
        ("qwen3_5_text", "position_ids[0]", "position_ids[0] + 1", "rotary_emb"),
    ],
)
def test_a_wrong_mixer_is_found_out(family: str, right: str, wrong: str, block: str) -> None:
    spec, text = _generated(family)
    assert right in text
    with pytest.raises(OnboardError, match=f"{block}.* differs from transformers"):
        prove(text.replace(right, wrong), spec, export=False)


@pytest.mark.parametrize(
    ("family", "kind", "key"),
    [
        ("mamba2", "gated_rmsnorm", "group_size"),
        ("mamba2", "gated_rmsnorm", "norm_before_gate"),
        ("minicpm3", "attention", "kv_b_proj"),
    ],
)
def test_a_hostile_mixer_is_refused(family: str, kind: str, key: str) -> None:
    text = edited(_generated(family)[0], kind, **{key: "self.weight); print(x"})
    with pytest.raises(OnboardError, match="where an identifier belongs"):
        ModelSpec.from_yaml(text)
