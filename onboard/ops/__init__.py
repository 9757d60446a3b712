"""Canonical ops (`torch.ops.onboard.torch_*`) and the back ends that replace them. Importing this registers them all.

| file | ops |
|---|---|
| `attention.py` | `torch_attention`, `torch_attention_repeat_kv`, `torch_attention_sdpa` |
| `block_attention.py` | `torch_cached_block_attention` |
| `block_indexer.py` | `torch_block_indexer`, `torch_cached_block_indexer` |
| `cached_attention.py` | `torch_cached_attention` |
| `cached_causal_conv.py` | `torch_cached_causal_conv1d` |
| `cached_delta_rule.py` | `torch_cached_delta_rule`, `torch_cached_gated_delta_rule` |
| `cached_indexer.py` | `torch_cached_lightning_indexer` |
| `cached_mla.py` | `torch_cached_mla` |
| `cached_sparse.py` | `torch_cached_sparse_mla` |
| `cached_ssm.py` | `torch_cached_selective_scan`, `torch_cached_ssm` |
| `causal_conv.py` | `torch_causal_conv1d` |
| `compressed_attention.py` | `torch_cached_compressed_attention`, `torch_compressed_attention` |
| `delta_rule.py` | `torch_delta_rule`, `torch_gated_delta_rule` |
| `dynamic_mask.py` | `torch_cached_dynamic_mask_attention`, `torch_dynamic_mask_attention` |
| `fla_delta_rule.py` | `fla_cached_gated_delta_rule` |
| `fused.py` | `torch_fused_add_rmsnorm`, `torch_fused_linear`, `torch_fused_swiglu_mlp`, `torch_silu_and_mul` |
| `fused_gated_norm.py` | `torch_fused_rmsnorm_gated` |
| `fused_gdn_gating.py` | `torch_fused_gdn_gating` |
| `fused_moe.py` | `torch_moe_fused` |
| `fused_rope.py` | `torch_norm_rope`, `torch_rope_cached`, `torch_rope_deinterleaved`, `torch_rope_pairs` |
| `gated_pool.py` | `torch_cached_gated_pool`, `torch_gated_pool` |
| `gather.py` | `gather_logits_before_lm_head` |
| `indexer.py` | `torch_lightning_indexer` |
| `kda.py` | `torch_cached_kda`, `torch_kda` |
| `lightning.py` | `torch_cached_lightning_attention`, `torch_lightning_attention` |
| `linear.py` | `torch_linear_simple`, `torch_swiglu_mlp` |
| `linear_recurrence.py` | `torch_cached_linear_recurrence`, `torch_linear_recurrence` |
| `mla.py` | `torch_mla` |
| `mlstm.py` | `torch_cached_mlstm`, `torch_mlstm` |
| `moe.py` | `torch_moe` |
| `norm.py` | `torch_l2norm`, `torch_layernorm`, `torch_rmsnorm` |
| `pointwise_op.py` | `torch_pointwise` |
| `relative_attention.py` | `torch_cached_relative_attention`, `torch_relative_attention` |
| `replayed_ssm.py` | `torch_replayed_ssm` |
| `residual_add.py` | `torch_cached_residual_add`, `torch_residual_add` |
| `rope.py` | `torch_rope_with_complex_freqs`, `torch_rope_with_explicit_cos_sin`, `torch_rope_with_qk_interleaving` |
| `router.py` | `torch_moe_router` |
| `shifted_positions.py` | `torch_shifted_positions` |
| `sparse.py` | `torch_sparse_mla` |
| `sparse_attention.py` | `torch_cached_sparse_attention`, `torch_sparse_attention` |
| `ssm.py` | `torch_rmsnorm_gated`, `torch_selective_scan`, `torch_ssm` |
| `token_shift.py` | `torch_cached_token_shift`, `torch_token_shift` |
| `triton/cached_attention.py` | `invariant_cached_attention`, `triton_cached_attention` |
| `triton/cached_causal_conv.py` | `triton_cached_causal_conv1d` |
| `triton/cached_delta_rule.py` | `triton_cached_delta_rule`, `triton_cached_gated_delta_rule` |
| `triton/cached_mla.py` | `triton_cached_mla` |
| `triton/cached_ssm.py` | `triton_cached_selective_scan`, `triton_cached_ssm` |
| `triton/gdn_gating.py` | `triton_fused_gdn_gating` |
| `triton/l2norm.py` | `triton_l2norm` |
| `triton/linear.py` | `invariant_fused_linear`, `triton_fused_linear` |
| `triton/moe.py` | `invariant_moe_fused`, `triton_moe_fused` |
| `triton/pointwise.py` | `triton_pointwise` |
| `triton/replayed_ssm.py` | `triton_replayed_ssm` |
| `triton/rmsnorm.py` | `triton_fused_add_rmsnorm`, `triton_rmsnorm` |
| `triton/rmsnorm_gated.py` | `triton_fused_rmsnorm_gated` |
| `triton/rope.py` | `triton_norm_rope`, `triton_rope_cached`, `triton_rope_deinterleaved`, `triton_rope_pairs` |
| `triton/router.py` | `triton_moe_router` |
| `triton/silu_mul.py` | `triton_silu_and_mul` |
| `triton/swiglu.py` | `triton_fused_swiglu_mlp` |
| `triton/wide_norm.py` | `triton_fused_add_wide_rmsnorm`, `triton_wide_rmsnorm` |
| `wide_norm.py` | `torch_fused_add_wide_rmsnorm`, `torch_wide_rmsnorm` |
| `wkv.py` | `torch_cached_wkv`, `torch_wkv` |

A `torch_*` op is the reference: it runs anywhere and says what the op means. The `triton_*` op of the same name has the
same arguments; it is there when the package triton is (`has_triton`), and needs a CUDA device, or Triton's interpreter
(`TRITON_INTERPRET=1` in the environment before triton is imported). An `invariant_*` op is the `triton_*` one whose
results for a row of its input are the same, bit for bit, whatever other rows there are.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil

from onboard.ops.library import op_sources

for _module in pkgutil.iter_modules(__path__):
    if not _module.ispkg:
        importlib.import_module(f"{__name__}.{_module.name}")  # registers its ops

if importlib.util.find_spec("triton") is not None:
    from onboard.ops import triton  # noqa: F401  (registers)


def has_triton() -> bool:
    """Whether the package triton is installed, and with it the `triton_*` ops are registered."""
    return importlib.util.find_spec("triton") is not None


def canonical_ops() -> set[str]:
    """Return the names of the `torch_*` ops that model files may use; what transforms put in is not among them."""
    return {
        name
        for name, source in op_sources().items()
        if name.startswith("torch_") and not (source.mutates or source.inserted)
    }


def stateful_ops() -> set[str]:
    """Return the names of the ops that need a cached form before a graph can generate; attention is not among them."""
    return {name for name, source in op_sources().items() if source.carries_state}


def attention_ops() -> set[str]:
    """Return the names of the canonical ops that attend: each token's result is a mean of values, by a softmax."""
    return {name for name in canonical_ops() if op_sources()[name].attends}
