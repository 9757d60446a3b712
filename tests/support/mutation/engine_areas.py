"""Which quick tests look after which files of the engine, and where a choice is free."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
UNIT = ROOT / "tests" / "unit"


@dataclass(frozen=True)
class Area:
    """Files that the same tests look after."""

    name: str
    files: tuple[str, ...]
    """Patterns, relative to the repository."""
    tests: tuple[str, ...]
    """Files below tests/unit, those first that are quick and near; `{stem}` is the mutated file's
    name.
    """
    options: tuple[str, ...] = ()
    interpreted: bool = False
    """Whether Triton's kernels run in its interpreter."""

    def sources(self) -> list[Path]:
        """Return the files, sorted, without those that only gather others."""
        found = {
            path
            for pattern in self.files
            for path in ROOT.glob(pattern)
            if path.name not in _FOR_GPUS
        }
        found = {path for path in found if (path.name in _OF_KERNELS) == self.interpreted}
        return sorted(path for path in found if path.name != "__init__.py")

    def tests_by_folder(self, path: Path) -> list[tuple[Path, list[str]]]:
        """Return the test files for a mutant of `path`, by folder, in order, those that bear its
        name first.
        """
        wanted = [UNIT / test.format(stem=path.stem) for test in self.tests]
        own = [
            UNIT / "ops" / f"test_op_{path.stem}.py",
            UNIT / path.parent.name / f"test_{path.stem}.py",
        ]
        own += [UNIT / "graph" / f"test_{path.stem}.py"]
        files = list(dict.fromkeys(each for each in own + wanted if each.is_file()))
        return [
            (folder, [str(each) for each in tests])
            for folder, tests in groupby(files, lambda each: each.parent)
        ]


_FOR_GPUS = {"dense_prefill.py", "fla_delta_rule.py"}
"""Files whose code needs a GPU (as do kernels, launchers and captures in `transforms/compile`: no
area has them).
"""

_OF_KERNELS = {"fuse_linears.py", "make_batch_invariant.py", "optimize_rope.py"}
"""Transforms that put kernels alone into a graph."""

FOR_GPUS = {
    "resize_kv_cache._activation_bytes",
    *(f"step_buffer.{name}" for name in ("written", "upload", "fetch", "fetched")),
    *(f"flight.{name}" for name in ("__init__", "_when_landed", "wait")),
    *(f"load_weights.{name}" for name in ("_direct", "_read_later")),
}
"""Functions that are called for a GPU alone, or do nothing without one."""

EQUIVALENT = {
    (
        "linear_recurrence",
        "span < out.shape[1] -> span <= out.shape[1]",
    ): "a last round adds nothing",
    ("masks", "max(_LENGTHS) -> min(_LENGTHS)"): "windows are tried that need not be",
    (
        "moe_routing",
        "(torch.randn(tensor.shape) * _BIAS_SCALE).to(tensor.dtype) -> torch.randn(tensor.shape) * _BIAS_SCALE",
    ): "both ways are tried with the same numbers, which have more digits",
    ("cached_sequence", ":2 -> 2:"): "names are read off the graph at each step",
    ("sequence", "self.buffer.written(layout) -> pass"): "nothing is copied to a GPU",
    ("load_weights", "later.append(load) -> pass"): "nothing is read straight to a GPU",
    ("sampling", "logits.float() -> logits"): "what is subtracted is float32",
    ("sampling", "largest.float() -> largest"): "what it is subtracted from is float32",
    (
        "scheduler",
        "length <= sequence.room -> length < sequence.room",
    ): "the longer way comes to the same",
    (
        "step_buffer",
        "ends[1] - groups * _aligned(sequences * pages_per_sequence * torch.int32.itemsize)"
        " -> ends[1] + groups * _aligned(sequences * pages_per_sequence * torch.int32.itemsize)",
    ): "it is how much of the buffer is copied to a GPU",
}
"""(File, mistake): why it changes no result here."""

CHOICES = {
    "cached_attention._share_a_call": "whether sequences are attended to in one call or one by one",
    "attention._plain_attention": "how the library is asked for the same attention",
}
"""Functions that choose between two ways to the same result: a mistake in the choice costs time
only.
"""

_ATTENTION = ("attention", "cached_attention", "block_attention", "mla", "cached_mla", "sparse", "cached_sparse",
              "indexer", "cached_indexer", "block_indexer", "sparse_attention", "relative_attention",
              "dynamic_mask", "gated_pool", "compressed_attention", "residual_add", "head_input",
              "shifted_positions", "stored", "rope_attention", "rope_mla", "turned_heads")  # fmt: skip
_RECURRENCES = ("causal_conv", "cached_causal_conv", "ssm", "cached_ssm", "replayed_ssm", "delta_rule",
                "cached_delta_rule", "dplr", "gated_linear", "kda", "lightning", "linear_recurrence", "mlstm",
                "token_shift", "wkv", "advance", "channel_decays")  # fmt: skip
_LAYERS = ("activation", "norm", "wide_norm", "rope", "linear", "moe", "router", "fused_moe", "fused", "fp8_linear",
           "fp8_codes", "fp8_swiglu", "nvfp4_codes", "nvfp4_swiglu",
           "four_bits", "four_bit_linear", "four_bit_product", "four_bit_vector", "quantised_moe", "four_bit_moe",
           "int8_moe", "int8_linear", "int8_product", "fused_gated_norm", "fused_gdn_gating", "fused_rope",
           "gather_logits", "lora")  # fmt: skip


def _ops(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"onboard/ops/*/{name}.py" for name in names)


AREAS = {
    area.name: area
    for area in (
        Area(
            "attention",
            _ops(_ATTENTION),
            ("ops/test_op_cached_state.py", "ops/test_op_attention.py", "ops/test_op_cached_attention.py",
             "ops/test_op_sparse.py", "ops/test_op_compressed.py", "ops/test_float8_cache.py",
             "ops/test_op_rope_attention.py"),
        ),
        Area(
            "places of results",
            ("onboard/ops/result_places.py",),
            ("ops/test_result_places.py",),
        ),
        Area(
            "recurrences",
            _ops(_RECURRENCES),
            ("ops/test_op_cached_state.py", "ops/test_op_recurrences.py", "ops/test_op_kda.py",
             "ops/test_op_dplr.py", "ops/test_op_gated_linear.py", "ops/test_op_mixers.py"),
        ),
        Area(
            "layers",
            _ops(_LAYERS),
            ("ops/test_op_norm.py", "ops/test_op_rope.py", "ops/test_op_linear.py", "ops/test_op_moe.py",
             "ops/test_op_four_bits.py", "ops/test_op_int8.py", "graph/weight_load/test_quantised_linears.py",
             "ops/test_op_quantised_moe.py",
             "ops/test_op_mixers.py", "graph/post_load_fusion/test_gather_logits.py",
             "graph/post_load_fusion/test_fuse_rmsnorm.py",
             "graph/post_load_fusion/test_fuse_silu_mul.py",
             "graph/post_load_fusion/test_quantising_producers.py",
             "graph/post_load_fusion/test_nvfp4_producers.py", "graph/post_load_fusion/test_fuse_gdn_gating.py",
             "graph/post_load_fusion/test_fuse_moe.py"),
        ),
        Area(
            "sampling",
            ("onboard/ops/sampling/sampling.py", "onboard/runtime/sampling_params.py"),
            ("runtime/test_sampling.py",),
            ("-k", "not interpreter"),
        ),
        Area(
            "steps",
            tuple(f"onboard/cache/{name}.py" for name in
                  ("batch", "step_buffer", "rows", "resources", "cached_sequence", "next_token")),
            ("cache/test_sequence.py", "cache/test_cache.py", "graph/cache_init/test_insert_cached_state.py",
             "graph/cache_init/test_insert_cached_attention.py", "runtime/test_engine.py",
             "runtime/test_codebooks.py"),
        ),
        Area(
            "scheduler",
            ("onboard/cache/pages.py", "onboard/runtime/length_dependent_rope.py",
             *(f"onboard/runtime/scheduling/{name}.py" for name in
               ("sequence_pages", "scheduler", "request", "decode_run"))),
            ("runtime/test_scheduler.py", "runtime/test_length_dependent_rope.py",
             "runtime/test_engine.py", "runtime/test_overlap.py",
             "runtime/test_windows.py"),
        ),
        Area(
            "engine",
            ("onboard/runtime/engine.py", "onboard/runtime/scheduling/pending_step.py"),
            ("runtime/test_engine.py", "runtime/test_overlap.py", "runtime/test_reuse.py", "runtime/test_llm.py",
             "runtime/test_prompts_with_images.py"),
        ),
        Area(
            "caches",
            ("transforms/cache_init/*.py", *(f"onboard/graph/cache_init/{name}.py" for name in
             ("insert_cached", "descriptor", "interface", "counted_positions"))),
            ("graph/cache_init/test_insert_cached_state.py", "graph/cache_init/test_insert_cached_attention.py",
             "graph/cache_init/test_replace_counted_positions.py", "graph/export/test_hf_attention.py",
             "runtime/test_engine.py",
             "runtime/test_windows.py"),
        ),
        Area(
            "plan",
            ("onboard/cache/budget.py", "onboard/runtime/plan.py"),
            ("runtime/test_plan.py",),
        ),
        Area(
            "patterns",
            ("transforms/pattern_matcher/*.py", *(f"onboard/graph/pattern_matcher/{name}.py" for name in
             ("masks", "moe_routing", "patterns"))),
            ("graph/pattern_matcher/test_match_masks.py", "graph/pattern_matcher/test_match_attention.py",
             "graph/pattern_matcher/test_match_moe_routing.py",
             "graph/pattern_matcher/test_match_helpers.py", "graph/pattern_matcher/test_match_rope_pattern.py",
             "graph/pattern_matcher/test_match_layouts.py"),
        ),
        Area(
            "fusions",
            ("transforms/post_load_fusion/*.py", "transforms/post_export/*.py"),
            ("graph/test_cleanup_graph.py", "graph/post_load_fusion/test_fuse_rmsnorm.py",
             "graph/post_load_fusion/test_fuse_silu_mul.py",
             "graph/post_load_fusion/test_fuse_gdn_gating.py", "graph/post_load_fusion/test_fuse_l2norm.py",
             "graph/post_load_fusion/test_gather_logits.py",
             "graph/post_load_fusion/test_fuse_models.py", "graph/post_load_fusion/test_fold_constants.py"),
        ),
        Area(
            "kernels in graphs",
            ("transforms/post_load_fusion/*.py", "transforms/cache_init/*.py"),
            ("graph/post_load_fusion/interpreted_fusions.py", "graph/post_load_fusion/interpreted_linears.py"),
            interpreted=True,
        ),
        Area(
            "weights",
            (
                "transforms/weight_load/*.py", *(f"onboard/graph/weight_load/{name}.py" for name in
                ("weight_sources", "expert_stacks", "gemm_fusion")), "onboard/graph/quantise/*.py",
            ),
            ("graph/quantise/test_four_bit_parts.py", "graph/quantise/test_four_bit_linears.py",
             "graph/weight_load/test_fuse_gemms.py", "graph/weight_load/test_load_weights.py",
             "graph/post_load_fusion/test_fuse_moe.py"),
        ),
    )
}  # fmt: skip
