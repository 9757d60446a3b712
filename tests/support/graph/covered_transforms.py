"""The transforms that texts on a comparable compiler name (caches, compilation, fusion behind
loading), and the tests of what each does to a graph and of what the graph then computes.
"""

from __future__ import annotations

_CACHES, _STATES = "graph/cache_init/test_insert_cached_", "test_the_cached_graph_computes_the_same"
_FUSIONS, _CODES = "graph/post_load_fusion/", "graph/quantise/test_coded_linears.py"
_KERNELS = (
    f"{_FUSIONS}interpreted_fusions.py::test_every_fusion_uses_its_kernel_and_keeps_the_result"
)
_STREAMS, _MIXTURES = (
    "experiments/test_multi_stream.py",
    "graph/weight_load/test_quantised_mixtures.py",
)
_PRODUCERS = f"{_FUSIONS}test_quantising_producers.py"
_MODES = "runtime/test_modes.py::test_both_modes_are_transformers_own_model"

COVERED: dict[str, tuple[str, ...]] = {
    "insert_cached_attention": (
        f"{_CACHES}attention.py::test_the_cached_graph_computes_the_same_attention",
    ),
    **dict.fromkeys(
        (
            *("insert_cached_mla_attention", "insert_cached_ssm_attention"),
            *("insert_cached_causal_conv", "insert_cached_delta_rule"),
            *("insert_cached_gated_delta_rule", "insert_cached_residual_add"),
        ),
        (f"{_CACHES}state.py::{_STATES}",),
    ),
    "initialize_mrope_delta_cache": (
        "graph/cache_init/test_initialize_mrope_delta_cache.py"
        "::test_positions_move_where_prompts_may_have_images",
    ),
    "initialize_cache": (f"{_CACHES}attention.py::test_the_first_pool_holds_one_sequence",),
    "resize_kv_cache": (f"{_CACHES}attention.py::test_the_pool_holds_what_sequences_can_fill",),
    "detect_hf_attn_layers": (_MODES,),
    "transformers_replace_cached_attn": (
        _MODES,
        "graph/export/test_hf_attention.py::test_every_attention_layer_gets_caches_of_its_own",
    ),
    "fuse_causal_conv_activation": (
        "graph/compile/test_fuse_causal_conv_activation.py"
        "::test_the_activation_moves_into_the_convolution",
    ),
    "multi_stream_moe": (f"{_STREAMS}::test_shared_experts_run_beside_the_routed_ones",),
    "multi_stream_mla_attn": (
        f"{_STREAMS}::test_the_whole_path_of_the_keys_runs_beside_the_queries",
    ),
    "multi_stream_gemm": (f"{_STREAMS}::test_the_largest_fp8_product_runs_beside_the_others",),
    "cleanup_identity_dtype_cast": (
        "graph/compile/test_cleanup_identity_dtype_cast.py::test_identities_are_removed",
    ),
    "compile_model": (
        "graph/compile/test_compile_model.py::test_a_decode_batch_replays_the_next_size",
        "graph/compile/test_compile_model.py::test_torch_compile_computes_the_same",
    ),
    "fuse_gemms": ("graph/weight_load/test_fuse_gemms.py::test_q_k_v_become_one",),
    "fuse_gemms_mixed_children": (
        "graph/weight_load/test_fuse_gemms.py"
        "::test_an_input_with_other_users_is_for_mixed_children_only",
        f"{_CODES}::test_linears_of_one_scheme_are_joined",
    ),
    **dict.fromkeys(
        ("fuse_fp8_gemms", "fuse_fp4_gemms"), (f"{_CODES}::test_linears_of_one_scheme_are_joined",)
    ),
    **dict.fromkeys(
        ("fuse_fp8_linear", "fuse_finegrained_fp8_linear", "fuse_nvfp4_linear"),
        (f"{_CODES}::test_linears_become_fused_ones",),
    ),
    "fuse_trtllm_attn_quant_fp8": (f"{_PRODUCERS}::test_logits_stay_the_writers",),
    "fuse_rmsnorm_quant_fp8": (f"{_PRODUCERS}::test_logits_stay_the_writers",),
    "fuse_finegrained_fp8_swiglu": (
        f"{_PRODUCERS}::test_a_block_with_eight_bit_weights_becomes_one_op",
    ),
    "fuse_nvfp4_swiglu": (f"{_PRODUCERS}::test_a_block_with_nvfp4_weights_becomes_one_op",),
    "fuse_relu2_quant_nvfp4": (
        f"{_FUSIONS}test_nvfp4_producers.py::test_squared_relu_writes_codes",
    ),
    "fuse_rmsnorm_quant_nvfp4": (
        f"{_FUSIONS}test_nvfp4_producers.py::test_norms_write_what_the_writer_quantises",
    ),
    "fuse_moe": (f"{_FUSIONS}test_fuse_moe.py::test_experts_are_stacked",),
    **dict.fromkeys(
        ("fuse_fp8_moe", "fuse_finegrained_fp8_moe"),
        (f"{_MIXTURES}::test_inputs_are_quantised_as_their_writer_does",),
    ),
    **dict.fromkeys(
        ("fuse_mxfp4_moe", "fuse_nvfp4_moe"),
        (f"{_MIXTURES}::test_four_bit_weights_give_the_decoded_models_tokens",),
    ),
    "fuse_allreduce_residual_rmsnorm": (
        "sharding/test_fused_all_reduce.py"
        "::test_each_residual_addition_of_a_model_takes_its_sum_in",
    ),
    "fuse_gdn_gating": (f"{_FUSIONS}test_fuse_gdn_gating.py::test_both_gates_become_one_op",),
    "fuse_l2norm": (
        f"{_FUSIONS}test_fuse_l2norm.py"
        "::test_every_scaling_is_matched_and_a_missing_back_end_is_a_fact",
    ),
    "fuse_silu_mul": (f"{_FUSIONS}test_fuse_silu_mul.py::test_halves_are_fused", _KERNELS),
    **dict.fromkeys(
        ("fuse_rmsnorm", "fuse_swiglu", "fuse_add_rms_norm"),
        (f"{_FUSIONS}test_fuse_models.py::test_logits_after_all_fusions", _KERNELS),
    ),
    "optimize_rope": (_KERNELS,),
    "gather_logits_before_lm_head": (
        f"{_FUSIONS}test_gather_logits.py::test_rows_are_gathered_before_the_head",
    ),
    "fuse_rope_into_trtllm_attention": (f"{_FUSIONS}test_fuse_rope.py::test_attention_rotates",),
    "fuse_rope_into_trtllm_mla": (f"{_FUSIONS}test_fuse_rope.py::test_latent_attention_rotates",),
    "mlir_elementwise_fusion": (
        "experiments/test_mlir_elementwise_fusion.py::test_kernels_are_right_in_the_interpreter",
        "experiments/test_mlir_elementwise_fusion.py::test_a_chain_is_one_kernel",
    ),
}
"""By key; paths are from `tests/unit`."""
