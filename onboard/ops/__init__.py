"""Canonical ops (`torch.ops.onboard.torch_*`) and the back ends that replace them. Importing this
registers them all.

| file | ops |
|---|---|
| `attention/attention.py` | `torch_attention`, `torch_attention_repeat_kv` |
| `attention/attention.py` | `torch_attention_sdpa` |
| `attention/block_attention.py` | `torch_cached_block_attention` |
| `attention/cached_attention.py` | `torch_cached_attention` |
| `attention/dynamic_mask.py` | `torch_cached_dynamic_mask_attention`, `torch_dynamic_mask_attention` |
| `attention/relative_attention.py` | `torch_cached_relative_attention`, `torch_relative_attention` |
| `attention/rope_attention.py` | `torch_cached_rope_attention`, `torch_rope_attention` |
| `attention/triton_cached_attention.py` | `invariant_cached_attention`, `triton_cached_attention` |
| `attention/triton_rope_attention.py` | `invariant_cached_rope_attention`, `triton_cached_rope_attention` |
| `codes/fp8_codes.py` | `torch_fp8_codes_linear`, `torch_rmsnorm_quant_fp8` |
| `codes/fp8_codes.py` | `torch_silu_and_mul_quant_fp8` |
| `codes/fp8_swiglu.py` | `torch_fused_finegrained_fp8_swiglu_mlp` |
| `codes/nvfp4_codes.py` | `torch_nvfp4_codes_linear`, `torch_relu2_quant_nvfp4` |
| `codes/nvfp4_codes.py` | `torch_rmsnorm_quant_nvfp4` |
| `codes/nvfp4_swiglu.py` | `torch_fused_nvfp4_swiglu_mlp` |
| `codes/triton_fp8_codes.py` | `triton_fp8_codes_linear`, `triton_rmsnorm_quant_fp8` |
| `codes/triton_fp8_codes.py` | `triton_silu_and_mul_quant_fp8` |
| `codes/triton_fp8_swiglu.py` | `triton_fused_finegrained_fp8_swiglu_mlp` |
| `codes/triton_nvfp4_swiglu.py` | `triton_fused_nvfp4_swiglu_mlp` |
| `collectives/collectives.py` | `all_gather`, `dist_all_reduce` |
| `collectives/fused_all_reduce.py` | `torch_fused_allreduce_residual_rmsnorm` |
| `collectives/marked_shapes.py` | `all_reduce`, `split_with_sizes` |
| `collectives/marked_shapes.py` | `view` |
| `collectives/rank_embedding.py` | `embedding_of_rank` |
| `collectives/stage_exchange.py` | `receive_from_stage`, `send_to_stage` |
| `collectives/triton_fused_all_reduce.py` | `triton_fused_allreduce_residual_rmsnorm` |
| `convolution/cached_causal_conv.py` | `torch_cached_causal_conv1d` |
| `convolution/causal_conv.py` | `torch_causal_conv1d` |
| `convolution/triton_cached_causal_conv.py` | `triton_cached_causal_conv1d` |
| `delta_rule/cached_delta_rule.py` | `torch_cached_delta_rule`, `torch_cached_gated_delta_rule` |
| `delta_rule/delta_rule.py` | `torch_delta_rule`, `torch_gated_delta_rule` |
| `delta_rule/dplr.py` | `torch_cached_dplr_delta_rule`, `torch_dplr_delta_rule` |
| `delta_rule/fla_delta_rule.py` | `fla_cached_gated_delta_rule` |
| `delta_rule/fused_gdn_gating.py` | `torch_fused_gdn_gating` |
| `delta_rule/kda.py` | `torch_cached_kda`, `torch_kda` |
| `delta_rule/triton_cached_delta_rule.py` | `triton_cached_delta_rule`, `triton_cached_gated_delta_rule` |
| `delta_rule/triton_cached_delta_rule.py` | `triton_cached_kda` |
| `delta_rule/triton_gdn_gating.py` | `triton_fused_gdn_gating` |
| `experts/four_bit_moe.py` | `torch_int4_moe`, `torch_mxfp4_moe` |
| `experts/four_bit_moe.py` | `torch_nvfp4_moe` |
| `experts/fused_moe.py` | `torch_moe_fused` |
| `experts/int8_moe.py` | `torch_int8_moe` |
| `experts/moe.py` | `torch_moe` |
| `experts/quantised_moe.py` | `torch_finegrained_fp8_moe`, `torch_fp8_moe` |
| `experts/router.py` | `torch_moe_router` |
| `experts/triton_moe.py` | `invariant_moe_fused`, `triton_moe_fused` |
| `experts/triton_quantised_moe.py` | `triton_finegrained_fp8_moe`, `triton_fp8_moe` |
| `experts/triton_quantised_moe.py` | `triton_int4_moe`, `triton_int8_moe` |
| `experts/triton_quantised_moe.py` | `triton_mxfp4_moe`, `triton_nvfp4_moe` |
| `experts/triton_router.py` | `triton_moe_router` |
| `four_bits/four_bit_linear.py` | `torch_fused_four_bit_linear`, `torch_int4_linear` |
| `four_bits/four_bit_linear.py` | `torch_mxfp4_linear`, `torch_nvfp4_linear` |
| `four_bits/triton_four_bit_linear.py` | `triton_fused_four_bit_linear` |
| `hidden_states/gather_logits.py` | `gather_logits_before_lm_head` |
| `hidden_states/head_input.py` | `torch_cached_head_input`, `torch_head_input` |
| `hidden_states/head_input.py` | `torch_kept_head_input` |
| `hidden_states/residual_add.py` | `torch_cached_residual_add`, `torch_residual_add` |
| `integers/int8_linear.py` | `torch_fused_int8_linear`, `torch_int8_linear` |
| `integers/triton_int8_linear.py` | `triton_fused_int8_linear` |
| `latent_attention/cached_mla.py` | `torch_cached_mla` |
| `latent_attention/mla.py` | `torch_mla` |
| `latent_attention/rope_mla.py` | `torch_cached_rope_mla`, `torch_rope_mla` |
| `latent_attention/triton_cached_mla.py` | `triton_cached_mla` |
| `latent_attention/triton_rope_mla.py` | `triton_cached_rope_mla` |
| `linear/fp8_linear.py` | `torch_finegrained_fp8_linear`, `torch_fp8_linear` |
| `linear/fp8_linear.py` | `torch_fused_fp8_linear` |
| `linear/fused.py` | `torch_fused_add_rmsnorm`, `torch_fused_linear` |
| `linear/fused.py` | `torch_fused_swiglu_mlp`, `torch_silu_and_mul` |
| `linear/linear.py` | `torch_linear_simple`, `torch_swiglu_mlp` |
| `linear/triton_fp8_linear.py` | `triton_fused_fp8_linear` |
| `linear/triton_linear.py` | `invariant_fused_linear`, `triton_fused_linear` |
| `linear/triton_silu_mul.py` | `triton_silu_and_mul` |
| `linear/triton_swiglu.py` | `triton_fused_swiglu_mlp` |
| `lora/lora.py` | `torch_lora` |
| `lora/triton_lora.py` | `triton_lora` |
| `norm/fused_gated_norm.py` | `torch_fused_rmsnorm_gated` |
| `norm/norm.py` | `torch_l2norm`, `torch_layernorm` |
| `norm/norm.py` | `torch_rmsnorm` |
| `norm/triton_l2norm.py` | `triton_l2norm` |
| `norm/triton_rmsnorm.py` | `triton_fused_add_rmsnorm`, `triton_rmsnorm` |
| `norm/triton_rmsnorm_gated.py` | `triton_fused_rmsnorm_gated` |
| `norm/triton_wide_norm.py` | `triton_fused_add_wide_rmsnorm`, `triton_wide_rmsnorm` |
| `norm/wide_norm.py` | `torch_fused_add_wide_rmsnorm`, `torch_wide_rmsnorm` |
| `recurrences/gated_linear.py` | `torch_cached_gated_linear_attention`, `torch_gated_linear_attention` |
| `recurrences/lightning.py` | `torch_cached_lightning_attention`, `torch_lightning_attention` |
| `recurrences/linear_recurrence.py` | `torch_cached_linear_recurrence`, `torch_linear_recurrence` |
| `recurrences/mlstm.py` | `torch_cached_mlstm`, `torch_mlstm` |
| `recurrences/token_shift.py` | `torch_cached_token_shift`, `torch_token_shift` |
| `recurrences/triton_cached_channels.py` | `triton_cached_linear_recurrence`, `triton_cached_token_shift` |
| `recurrences/triton_cached_channels.py` | `triton_cached_wkv` |
| `recurrences/triton_cached_lightning.py` | `triton_cached_lightning_attention` |
| `recurrences/triton_cached_mlstm.py` | `triton_cached_mlstm` |
| `recurrences/wkv.py` | `torch_cached_wkv`, `torch_wkv` |
| `rope/fused_rope.py` | `torch_norm_rope`, `torch_rope_cached` |
| `rope/fused_rope.py` | `torch_rope_deinterleaved`, `torch_rope_pairs` |
| `rope/rope.py` | `torch_rope_with_complex_freqs`, `torch_rope_with_explicit_cos_sin` |
| `rope/rope.py` | `torch_rope_with_qk_interleaving` |
| `rope/shifted_positions.py` | `torch_shifted_positions` |
| `rope/triton_rope.py` | `triton_norm_rope`, `triton_rope_cached` |
| `rope/triton_rope.py` | `triton_rope_deinterleaved`, `triton_rope_pairs` |
| `sparse/block_indexer.py` | `torch_block_indexer`, `torch_cached_block_indexer` |
| `sparse/cached_indexer.py` | `torch_cached_lightning_indexer` |
| `sparse/cached_sparse.py` | `torch_cached_sparse_mla` |
| `sparse/compressed_attention.py` | `torch_cached_compressed_attention`, `torch_compressed_attention` |
| `sparse/gated_pool.py` | `torch_cached_gated_pool`, `torch_gated_pool` |
| `sparse/indexer.py` | `torch_lightning_indexer` |
| `sparse/sparse.py` | `torch_sparse_mla` |
| `sparse/sparse_attention.py` | `torch_cached_sparse_attention`, `torch_sparse_attention` |
| `sparse/triton_cached_sparse_mla.py` | `triton_cached_sparse_mla` |
| `ssm/cached_ssm.py` | `torch_cached_selective_scan`, `torch_cached_ssm` |
| `ssm/replayed_ssm.py` | `torch_replayed_ssm` |
| `ssm/ssm.py` | `torch_rmsnorm_gated`, `torch_selective_scan` |
| `ssm/ssm.py` | `torch_ssm` |
| `ssm/triton_cached_ssm.py` | `triton_cached_selective_scan`, `triton_cached_ssm` |
| `ssm/triton_replayed_ssm.py` | `triton_replayed_ssm` |

A folder holds a mechanism: its reference, its cached form, launchers and kernels of Triton, other
libraries' operators; `triton/` what all launchers share. A `torch_*` op is the reference: it runs
anywhere and says what the op means. The `triton_*` op of the same name has the same arguments; it
is there when the package triton is (`has_triton`), and needs a CUDA device, or Triton's interpreter
(`TRITON_INTERPRET=1` in the environment before triton is imported). An `invariant_*` op is the
`triton_*` one whose results for a row of its input are the same, bit for bit, whatever other rows
there are.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

from onboard.ops.library import op_sources


def has_triton() -> bool:
    """Whether the package triton is installed, and with it the `triton_*` ops are registered."""
    return importlib.util.find_spec("triton") is not None


def canonical_ops() -> set[str]:
    """Return the names of the ops that model files may use: `torch_*` ones, but for what transforms
    put in, and those that say how ranks divide a layer.
    """
    return {
        name
        for name, source in op_sources().items()
        if source.marks or (name.startswith("torch_") and not (source.mutates or source.inserted))
    }


def stateful_ops() -> set[str]:
    """Return the names of the ops that need a cached form before a graph can generate; attention is
    not among them.
    """
    return {name for name, source in op_sources().items() if source.carries_state}


def attention_ops() -> set[str]:
    """Return the names of the canonical ops that attend: each token's result is a mean of values,
    by a softmax.
    """
    return {name for name in canonical_ops() if op_sources()[name].attends}


def _register() -> None:
    """Import every module of a room that registers ops; those of kernels where the package triton
    is.
    """
    for path in sorted(Path(__file__).parent.glob("*/*.py")):
        is_there = not path.stem.startswith("triton_") or has_triton()
        if is_there and "@register_op" in path.read_text(encoding="utf-8"):
            importlib.import_module(f"{__name__}.{path.parent.name}.{path.stem}")


_register()
