"""Fusions in whole models that ship, through the default pipeline: they match, and results stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from onboard.graph.compile.streams import wait_aux
from onboard.graph.fx import nodes_of
from onboard.runtime.engine import Engine
from onboard.testing.compare import rmse_ratio
from tests.support.runtime.tiny import Tiny

pytestmark = pytest.mark.exhaustive

IDS = [5, 1, 40, 7, 7, 23, 9]
LATENT = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 10, "num_key_value_heads": 4,
}  # fmt: skip
HYBRID = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "head_dim": 8, "num_hidden_layers": 4,
}  # fmt: skip


def _matches(engine: Engine, key: str) -> int:
    return sum(entry.num_matches for entry in engine.history if entry.key == key)


def test_each_layer_of_latent_attention_has_a_branch_with_projections_joined(
    tiny: Callable[..., Tiny],
) -> None:
    made = tiny("deepseek_v3", own_file=False, **LATENT)
    engine = made.engine(transforms={"multi_stream_mla_attn": {"enabled": True}})
    assert _matches(engine, "fuse_gemms") > 0
    assert _matches(engine, "multi_stream_mla_attn") == 2
    graph = getattr(engine.gm, "gm", engine.gm)
    assert len(nodes_of(graph, wait_aux)) == 2
    assert rmse_ratio(engine.logits(IDS), made.logits(IDS)) <= 1e-5


def test_gates_of_delta_rules_are_one_op(tiny: Callable[..., Tiny]) -> None:
    made = tiny("qwen3_next", own_file=False, **HYBRID)
    engine = made.engine()
    assert _matches(engine, "fuse_gdn_gating") == 3
    assert not [fact for fact in engine.facts if "fuse_gdn_gating" in fact]
    assert rmse_ratio(engine.logits(IDS), made.logits(IDS)) <= 1e-5


def test_sums_in_float32_join_norms_of_16_bits(tiny: Callable[..., Tiny]) -> None:
    made = tiny("mamba", own_file=False, state_size=4, intermediate_size=64)
    fused = made.engine(dtype="bfloat16")
    apart = made.engine(dtype="bfloat16", transforms={"fuse_add_rms_norm": {"enabled": False}})
    assert _matches(fused, "fuse_add_rms_norm") == 2
    calls = nodes_of(getattr(fused.gm, "gm", fused.gm), torch.ops.onboard.torch_fused_add_rmsnorm)
    assert [node.args[4:] for node in calls] == [(torch.bfloat16,), ()], (
        "the last norm reads the sum as it is"
    )
    assert torch.equal(fused.logits(IDS), apart.logits(IDS))
