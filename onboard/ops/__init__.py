"""Canonical ops (`torch.ops.onboard.torch_*`) and the back ends that replace them. Importing this registers them all.

| op | file |
|---|---|
| `torch_attention`, `torch_attention_sdpa`, `torch_attention_repeat_kv` | `attention.py` |
| `torch_rope_with_explicit_cos_sin`, `torch_rope_with_complex_freqs`, `torch_rope_with_qk_interleaving` | `rope.py` |
| `torch_rmsnorm`, `torch_l2norm`, `torch_layernorm` | `norm.py` |
| `torch_linear_simple`, `torch_swiglu_mlp` | `linear.py` |
| `torch_mla` | `mla.py` |
| `torch_sparse_mla` | `sparse.py` |
| `torch_dynamic_mask_attention`, `torch_cached_dynamic_mask_attention` | `dynamic_mask.py` |
| `torch_relative_attention`, `torch_cached_relative_attention` | `relative_attention.py` |
| `torch_lightning_indexer` | `indexer.py` |
| `torch_block_indexer`, `torch_cached_block_indexer` | `block_indexer.py` |
| `torch_sparse_attention`, `torch_cached_sparse_attention` | `sparse_attention.py` |
| `torch_gated_pool`, `torch_cached_gated_pool` | `gated_pool.py` |
| `torch_compressed_attention`, `torch_cached_compressed_attention` | `compressed_attention.py` |
| `torch_causal_conv1d` | `causal_conv.py` |
| `torch_ssm`, `torch_selective_scan`, `torch_rmsnorm_gated` | `ssm.py` |
| `torch_gated_delta_rule`, `torch_delta_rule` | `delta_rule.py` |
| `torch_kda`, `torch_cached_kda` | `kda.py` |
| `torch_lightning_attention`, `torch_cached_lightning_attention` | `lightning.py` |
| `torch_linear_recurrence`, `torch_cached_linear_recurrence` | `linear_recurrence.py` |
| `torch_mlstm`, `torch_cached_mlstm` | `mlstm.py` |
| `torch_token_shift`, `torch_cached_token_shift` | `token_shift.py` |
| `torch_wkv`, `torch_cached_wkv` | `wkv.py` |
| `torch_moe` | `moe.py` |
| `torch_residual_add`, `torch_cached_residual_add` | `residual_add.py` |
| `torch_shifted_positions` | `shifted_positions.py` |
| `gather_logits_before_lm_head` | `gather.py` |
| `torch_cached_attention` | `cached_attention.py` |
| `torch_cached_block_attention` | `block_attention.py` |
| `torch_cached_mla` | `cached_mla.py` |
| `torch_cached_sparse_mla` | `cached_sparse.py` |
| `torch_cached_lightning_indexer` | `cached_indexer.py` |
| `torch_cached_causal_conv1d` | `cached_causal_conv.py` |
| `torch_cached_ssm`, `torch_cached_selective_scan` | `cached_ssm.py` |
| `torch_replayed_ssm` | `replayed_ssm.py` |
| `torch_cached_gated_delta_rule`, `torch_cached_delta_rule` | `cached_delta_rule.py` |
| `fla_cached_gated_delta_rule` | `fla_delta_rule.py` |
| `torch_fused_add_rmsnorm`, `torch_silu_and_mul`, `torch_fused_swiglu_mlp`, `torch_fused_linear` | `fused.py` |
| `torch_rope_cached`, `torch_norm_rope`, `torch_rope_deinterleaved`, `torch_rope_pairs` | `fused_rope.py` |
| `torch_fused_gdn_gating` | `fused_gdn_gating.py` |
| `torch_fused_rmsnorm_gated` | `fused_gated_norm.py` |
| `torch_wide_rmsnorm`, `torch_fused_add_wide_rmsnorm` | `wide_norm.py` |
| `torch_moe_fused` | `fused_moe.py` |
| `torch_moe_router` | `router.py` |
| `torch_pointwise` | `pointwise_op.py` |
| `triton_cached_attention`, `invariant_cached_attention` | `triton/cached_attention.py` |
| `triton_cached_mla` | `triton/cached_mla.py` |
| `triton_cached_causal_conv1d` | `triton/cached_causal_conv.py` |
| `triton_cached_ssm`, `triton_cached_selective_scan` | `triton/cached_ssm.py` |
| `triton_replayed_ssm` | `triton/replayed_ssm.py` |
| `triton_cached_gated_delta_rule`, `triton_cached_delta_rule` | `triton/cached_delta_rule.py` |
| `triton_rmsnorm`, `triton_fused_add_rmsnorm` | `triton/rmsnorm.py` |
| `triton_wide_rmsnorm`, `triton_fused_add_wide_rmsnorm` | `triton/wide_norm.py` |
| `triton_silu_and_mul` | `triton/silu_mul.py` |
| `triton_rope_cached`, `triton_norm_rope`, `triton_rope_deinterleaved`, `triton_rope_pairs` | `triton/rope.py` |
| `triton_l2norm` | `triton/l2norm.py` |
| `triton_fused_gdn_gating` | `triton/gdn_gating.py` |
| `triton_fused_swiglu_mlp` | `triton/swiglu.py` |
| `triton_fused_rmsnorm_gated` | `triton/rmsnorm_gated.py` |
| `triton_moe_fused`, `invariant_moe_fused` | `triton/moe.py` |
| `triton_moe_router` | `triton/router.py` |
| `triton_pointwise` | `triton/pointwise.py` |
| `triton_fused_linear`, `invariant_fused_linear` | `triton/linear.py` |

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
