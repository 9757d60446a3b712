from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onboard.graph.assembly.assemble import load_pipeline
from onboard.graph.context import TransformContext
from onboard.graph.fx import graph_modules, nodes_of
from onboard.graph.transform import BaseTransform, Stages, TransformConfig, TransformInfo
from onboard.verify.transforms.stages import VerifyReport, verify_model
from tests.support.runtime.tiny import Tiny

CONFIG = {"max_seq_len": 64, "kv_cache_config": {"tokens_per_block": 4}}
LENGTHS = (11, 17, 33, 48)
NEEDED = (
    "build_model",
    "export_to_gm",
    "cleanup_noop_add",
    "load_weights",
    "insert_cached_attention",
)
NEEDED += ("initialize_cache", "resize_kv_cache", "compile_model")
"""What serves this model, whose file is written in canonical ops: a broken transform is looked for
among these.
"""
CACHED = {"prefill", "chunked prefill", "decode", "batched decode"}


class _Spoil(BaseTransform[TransformConfig]):
    """A deliberately broken transform: `spoil` edits the module."""

    key = "spoil"

    def __init__(self, stage: str, spoil: Callable[[Any, TransformContext], None]) -> None:
        super().__init__(TransformConfig(stage=stage, run_per_gm=False))
        self.spoil = spoil

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        self.spoil(gm, context)
        return gm, TransformInfo(num_matches=1)


def _verify(
    model: Tiny, spoil: _Spoil | None = None, after: str = "", **options: Any
) -> VerifyReport:
    transforms = load_pipeline({})
    if spoil is not None:
        transforms = [transform for transform in transforms if transform.key in NEEDED]
        at = next(i for i, transform in enumerate(transforms) if transform.key == after)
        transforms.insert(at + 1, spoil)
    settings = {"device": "cpu", "dtype": "float32", "config": CONFIG, **options}
    return verify_model(model.checkpoint, root=model.root, transforms=transforms, **settings)


def test_the_pipeline_is_the_model_after_every_transform(llama: Tiny) -> None:
    report = _verify(llama)
    assert report.passed, report.first_failure
    enabled = [transform.key for transform in load_pipeline({}) if transform.config.enabled]
    assert [check.transform for check in report.checks] == enabled
    ways = {check.transform: set(check.errors) for check in report.checks}
    assert ways["build_model"] == ways["load_weights"] == {"prefill"}
    assert ways["insert_cached_attention"] == ways["compile_model"] == CACHED
    assert all(0 < error < 1e-5 for check in report.checks for error in check.errors.values())


def _double_a_projection(gm: nn.Module, context: TransformContext) -> None:
    [(_, graph)] = graph_modules(gm)
    node = nodes_of(graph, torch.ops.aten.linear)[2]
    with graph.graph.inserting_after(node):
        twice = graph.graph.call_function(torch.ops.aten.mul.Scalar, (node, 1.001))
    node.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)
    graph.recompile()


def _forget_the_cache(gm: nn.Module, context: TransformContext) -> None:
    """Write all keys to the spare page: also a whole prefill reads them from the cache, so every
    way is wrong.
    """
    [(_, graph)] = graph_modules(gm)
    for node in nodes_of(graph, torch.ops.onboard.torch_cached_attention):
        with graph.graph.inserting_before(node):
            nowhere = graph.graph.call_function(torch.ops.aten.zeros_like.default, (node.args[6],))
        node.update_arg(6, nowhere)
    graph.recompile()


def _ignore_cached_keys(gm: nn.Module, context: TransformContext) -> None:
    """Let each token see only the step's own keys: right for whole prefill, wrong for everything
    else.
    """
    [(_, graph)] = graph_modules(gm)
    for node in nodes_of(graph, torch.ops.onboard.torch_cached_attention):
        with graph.graph.inserting_before(node):
            args = [
                graph.graph.call_function(torch.ops.aten.clone.default, (node.args[i],))
                for i in (8, 9)
            ]
        node.update_arg(8, args[0])
        node.update_arg(9, args[1])
    graph.recompile()


def _spoil_steps(
    factor: float, wrong: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., None]:
    """Multiply the attention outputs by `factor` in the steps for which `wrong`, given
    batch_info_host, is true.
    """

    def apply(output: torch.Tensor, info: torch.Tensor) -> torch.Tensor:
        return output * factor if wrong(info) else output

    def spoil(gm: nn.Module, context: TransformContext) -> None:
        [(_, graph)] = graph_modules(gm)
        for node in nodes_of(graph, torch.ops.onboard.torch_cached_attention):
            with graph.graph.inserting_after(node):
                spoiled = graph.graph.call_function(apply, (node, node.args[7]))
            node.replace_all_uses_with(
                spoiled, delete_user_cb=lambda user, new=spoiled: user is not new
            )
        graph.recompile()

    return spoil


def _raise_at_run_time(gm: nn.Module, context: TransformContext) -> None:
    [(_, graph)] = graph_modules(gm)
    node = nodes_of(graph, torch.ops.aten.linear)[0]
    node.update_arg(1, node.args[0])
    graph.recompile()


@pytest.mark.drawn(few=3)
@pytest.mark.parametrize(
    ("after", "stage", "spoil", "right"),
    [
        ("cleanup_noop_add", Stages.POST_EXPORT, _double_a_projection, set()),
        ("load_weights", Stages.WEIGHT_LOAD, _double_a_projection, set()),
        ("insert_cached_attention", Stages.CACHE_INIT, _forget_the_cache, set()),
        ("resize_kv_cache", Stages.CACHE_INIT, _ignore_cached_keys, {"prefill"}),
        (
            "resize_kv_cache",
            Stages.CACHE_INIT,
            _spoil_steps(1.01, lambda info: info[2] == 1),
            {"prefill", "chunked prefill"},
        ),
        (
            "compile_model",
            Stages.COMPILE,
            _spoil_steps(1.01, lambda info: info[0] == info[1] and info[0] > 1),
            {"prefill", "chunked prefill", "decode"},
        ),
        (
            "compile_model",
            Stages.COMPILE,
            _spoil_steps(math.nan, lambda info: info[1] == LENGTHS[-1]),
            CACHED - {"prefill"},
        ),
    ],
)
def test_a_broken_transform_is_the_one_that_is_named(
    llama: Tiny, after: str, stage: str, spoil: Callable[..., None], right: set[str]
) -> None:
    report = _verify(llama, _Spoil(stage, spoil), after)
    failure = report.first_failure
    assert failure is not None
    assert failure.transform == "spoil"
    assert {way for way, error in failure.errors.items() if error <= failure.limit.error} == right
    assert not any(check.passes for check in report.checks[report.checks.index(failure) :])


def test_a_graph_that_does_not_run_is_a_finding(llama: Tiny) -> None:
    report = _verify(llama, _Spoil(Stages.CACHE_INIT, _raise_at_run_time), "resize_kv_cache")
    assert report.first_failure is not None
    assert report.first_failure.transform == "spoil"
    assert "RuntimeError" in str(report.first_failure.exception)
    assert report.as_dict()["first_failure"] == "spoil"


def test_half_precision_is_measured_against_transformers_in_float32(llama: Tiny) -> None:
    report = _verify(llama, dtype="bfloat16")
    assert report.passed, report.first_failure
    assert 1e-3 < report.limit.reference_error < report.limit.error < 0.1


def test_a_window_and_a_rotary_table_that_depend_on_the_length(tiny: Callable[..., Tiny]) -> None:
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 5.0, 9.0]}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 24,
        **factors,
    }
    report = _verify(tiny("mistral", sliding_window=40, rope_parameters=rope))
    assert report.passed, report.first_failure
    assert max(report.prompt_lengths) > 40
