from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.export import Dim

from onboard.config import with_settings
from onboard.errors import OnboardError, UsageError
from onboard.graph.assembly.assemble import load_pipeline, pipeline_for
from onboard.graph.context import TransformContext
from onboard.graph.export.to_graph import export_to_graph
from onboard.graph.fx import add_placeholder, copy_graphs, fake_mode, nodes_of, placeholders
from onboard.graph.pipeline import Pipeline
from onboard.graph.shapes import propagate_shapes
from onboard.graph.transform import (
    BaseTransform,
    GraphTransform,
    Stages,
    TransformConfig,
    TransformInfo,
    get_transform,
    transform_keys,
)
from onboard.graph.weight_load.parameters import join_parameters, weight_plan
from tests.support.graph.covered_transforms import COVERED
from tests.support.graph.harness import EXPORT, make_context, random_inputs, randomize, run_only


def test_the_pipelines_list_every_shipped_transform_in_the_stage_of_its_folder() -> None:
    listed = [*load_pipeline({}, "transformers"), *load_pipeline({})]

    assert {transform.key: transform.config.stage for transform in listed} == transform_keys()


def test_a_mechanism_of_a_file_of_its_own_is_cached_before_the_caches_are_made() -> None:
    keys = [transform.key for transform in load_pipeline({"insert_cached_kda": {"enabled": False}})]

    assert keys.count("insert_cached_kda") == keys.count("insert_cached_attention") == 1
    assert keys.index("insert_cached_kda") < keys.index("initialize_cache")
    assert not any("*" in key for key in keys)


def test_transforms_are_sorted_by_stage_and_then_by_the_file() -> None:
    stages = [transform.config.stage for transform in load_pipeline({})]

    assert stages == sorted(stages, key=list(Stages).index)
    assert [transform.key for transform in load_pipeline({})][:2] == ["build_model", "export_to_gm"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"export_to_gn": {}}, "export_to_gm"),
        ({"export_to_gm": {"strictt": True}}, "'strict'"),
        ({"export_to_gm": {"strict": "perhaps"}}, "export_to_gm.*strict.*perhaps"),
        ({"export_to_gm": {"stage": "exporting"}}, "export_to_gm.*stage"),
    ],
)
def test_a_wrong_override_names_the_place_and_the_remedy(
    overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        load_pipeline(overrides)


FIELDS: dict[str, dict[str, Any]] = {
    "fuse_fp8_linear": {"backend": "torch"},
    "fuse_nvfp4_linear": {"backend": "trtllm"},
    "fuse_finegrained_fp8_linear": {"backend": "trtllm"},
    "fuse_moe": {"backend": "auto"},
    "fuse_fp8_moe": {"backend": "auto", "allow_different_input_scales": False},
    "fuse_nvfp4_moe": {
        "backend": "cutlass",
        "allow_different_input_scales": False,
        "reverse_interleaved_input_scales": True,
        "enable_trtllm_gen_internal_routing": True,
    },
    "fuse_rmsnorm": {"rmsnorm_backend": "flashinfer", "gated_rmsnorm_backend": "triton"},
    "fuse_l2norm": {"backend": "fla"},
    "fuse_silu_mul": {"backend": "flashinfer"},
    "fuse_swiglu": {"enabled": True},
    "fuse_rope_into_trtllm_attention": {"fuse_qkv_passthrough": True},
    **{key: {"backend": None} for key in COVERED if key.startswith("insert_cached_")},
    "insert_cached_ssm_attention": {"backend": None, "ssm_replay": False},
    "transformers_replace_cached_attn": {"backend": None},
    "compile_model": {
        "cuda_graph_batch_sizes": None,
        "num_batched_inputs": None,
        "piecewise_num_tokens": None,
    },
}
"""Fields that the texts name, with their defaults; what has no other default here."""


@pytest.mark.parametrize("key", FIELDS)
def test_its_fields_have_the_defaults_of_the_text(key: str) -> None:
    given = {"backend": "torch-simple"} if key == "compile_model" else {}  # it has no default
    config = get_transform(key).config_class(stage=transform_keys()[key], **given)
    assert {name: getattr(config, name) for name in FIELDS[key]} == FIELDS[key]


def test_an_enabled_transform_with_nothing_to_do_is_a_fact_and_one_of_the_defaults_is_not(
    tmp_path: Path,
) -> None:
    keys = (*EXPORT, "match_repeat_kv", "match_l2norm_pattern", "match_token_shift")
    context = make_context(tmp_path)
    run_only(
        context,
        keys,
        match_l2norm_pattern={"enabled": True},
        match_token_shift={"run_shape_prop": False},
    )

    idle = {entry.key for entry in context.history if not entry.num_matches and not entry.summary}
    assert {"match_repeat_kv", "match_l2norm_pattern", "match_token_shift"} <= idle
    assert context.facts == [
        "match_l2norm_pattern found nothing to do, and the run's settings enable it"
    ]


def test_history_has_one_json_entry_a_transform(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = make_context(tmp_path)
    with caplog.at_level(logging.INFO, "onboard.pipeline"):
        run_only(context, EXPORT, cleanup_noop_add={"enabled": False})

    assert [entry.key for entry in context.history] == list(EXPORT)
    assert [entry.enabled for entry in context.history] == [
        key != "cleanup_noop_add" for key in EXPORT
    ]
    assert all(entry.is_clean for entry in context.history)
    assert (
        json.loads(json.dumps([asdict(entry) for entry in context.history]))[1]["num_matches"] == 1
    )
    lines = [record for record in caplog.records if record.name == "onboard.pipeline"]
    assert len(lines) == len(EXPORT)


def test_dumps_are_readable_python_with_operator_counts(tmp_path: Path) -> None:
    context = make_context(tmp_path)
    wanted = [transform for transform in load_pipeline({}) if transform.key in EXPORT]
    Pipeline(wanted, dump_dir=tmp_path / "dumps").run(context)

    text = (tmp_path / "dumps" / "01_export_export_to_gm.py").read_text("utf-8")
    assert "#     2  onboard.torch_attention.default" in text
    compile(text, "dump", "exec")


def test_the_history_counts_nodes_and_operators(tmp_path: Path) -> None:
    """Beside what an observer counts in the graph after each transform."""
    context, seen = make_context(tmp_path), dict[str, Counter[str]]()

    def look(key: str, module: nn.Module, _: TransformContext) -> None:
        graphs = [each for each in module.modules() if isinstance(each, fx.GraphModule)]
        nodes = [node for gm in graphs for node in gm.graph.nodes]
        seen[key] = Counter(
            str(node.target).split(".")[1] if "." in str(node.target) else ""
            for node in nodes
            if isinstance(node.target, torch._ops.OpOverload)
        ) + Counter({"all": len(nodes)})

    transforms = load_pipeline({})
    end = next(n for n, each in enumerate(transforms) if each.key == "load_weights")
    Pipeline(transforms[:end]).run(context, look)
    before = Counter[str]()
    changed = 0
    for entry in context.history:
        if entry.key not in seen or not entry.enabled:
            continue
        after = seen[entry.key]
        if entry.nodes is not None:
            assert entry.nodes == (before["all"], after["all"]), entry.key
        names = {*before, *after} - {"all"}
        change = {name: after[name] - before[name] for name in names if after[name] != before[name]}
        assert entry.ops == change, entry.key
        changed += bool(change)
        before = after
    assert changed >= 3


def test_the_observer_sees_the_module_after_each_transform(tmp_path: Path) -> None:
    seen: list[tuple[str, bool]] = []
    wanted = [transform for transform in load_pipeline({}) if transform.key in EXPORT]
    Pipeline(wanted).run(
        make_context(tmp_path),
        observer=lambda key, gm, context: seen.append((key, isinstance(gm, fx.GraphModule))),
    )

    assert seen == [(key, key != "build_model") for key in EXPORT]


class _Breaking(GraphTransform[TransformConfig]):
    key = "breaking"
    error: Exception = RuntimeError("half way")

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        gm.graph.output_node().args = (placeholders(gm)[0],)
        raise self.error


class _Doubling(GraphTransform[TransformConfig]):
    """Doubles the logits, leaves a dead node behind and says that the graph needs cleaning."""

    key = "doubling"
    keeps_shapes = False

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        output = gm.graph.output_node()
        with gm.graph.inserting_before(output):
            gm.graph.call_function(torch.ops.aten.neg.default, (output.args[0],))
            output.args = (
                gm.graph.call_function(torch.ops.aten.mul.Tensor, (output.args[0], 2.0)),
            )
        return 1


class _Counting(GraphTransform[TransformConfig]):
    """Says that it had `count` matches."""

    key = "counting"
    count: int | TransformInfo = 0

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int | TransformInfo:
        return self.count


@pytest.mark.parametrize("keeps_shapes", [True, False])
@pytest.mark.parametrize("count", [0, 3])
def test_what_holds_for_a_graph_follows_from_the_matches(
    tmp_path: Path, count: int, keeps_shapes: bool
) -> None:
    counting, context = _Counting(TransformConfig(stage=Stages.POST_EXPORT)), make_context(tmp_path)
    counting.count, counting.keeps_shapes = count, keeps_shapes  # type: ignore[misc]
    graph = fx.symbolic_trace(nn.Identity())
    module, info = counting.apply(graph, context)
    assert module is graph
    assert info == TransformInfo(
        num_matches=count, is_clean=count == 0, has_valid_shapes=keeps_shapes or count == 0
    )
    counting.count = TransformInfo(num_matches=count, summary="more")
    assert counting.apply(graph, context) == (graph, counting.count)
    with pytest.raises(AssertionError, match="counting edits graphs, this is a Identity"):
        counting.apply(nn.Identity(), context)


def _with(transform: BaseTransform[Any]) -> list[BaseTransform[Any]]:
    return [*(each for each in load_pipeline({}) if each.key in EXPORT), transform]


def test_a_failing_transform_is_undone_and_recorded(tmp_path: Path) -> None:
    context = make_context(tmp_path)
    breaking = _Breaking(TransformConfig(stage=Stages.POST_EXPORT, skip_on_error=True))
    gm = Pipeline(_with(breaking)).run(context)

    assert isinstance(gm, fx.GraphModule)
    assert gm.graph.output_node().args[0] is not placeholders(gm)[0]
    assert context.history[-1].error == "RuntimeError: half way"
    assert context.history[-1].skipped
    assert context.facts == ["breaking failed and was skipped: RuntimeError: half way"]


class _Joining(GraphTransform[TransformConfig]):
    """Joins the first parameter with zeros, again and again; with `skip_on_error` it fails
    afterwards.
    """

    key = "joining"

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> TransformInfo:
        joins = weight_plan(gm).joins
        name = next(iter(joins), None) or next(name for name, _ in gm.named_parameters())
        join_parameters(gm, f"{name}_joined", [name, 3])
        if self.config.skip_on_error:
            raise RuntimeError("half way")
        return TransformInfo(num_matches=1, is_clean=True)


def test_a_failing_transform_leaves_the_plan_of_the_weights_as_it_was(tmp_path: Path) -> None:
    context = make_context(tmp_path)
    once = _Joining(TransformConfig(stage=Stages.POST_EXPORT))
    failing = _Joining(
        TransformConfig(stage=Stages.POST_EXPORT, skip_on_error=True, requires_clean_graph=False)
    )
    module = Pipeline([*_with(once), failing]).run(context)

    assert context.history[-1].error == "RuntimeError: half way"
    [(name, join)] = weight_plan(module).joins.items()
    assert [part.size for part in join.parts][1:] == [3]
    assert name in dict(module.named_parameters())


def test_strict_turns_facts_into_errors(tmp_path: Path) -> None:
    breaking = _Breaking(TransformConfig(stage=Stages.POST_EXPORT, skip_on_error=True))
    with pytest.raises(OnboardError, match="half way"):
        Pipeline(_with(breaking), strict=True).run(make_context(tmp_path))


def test_a_failing_transform_fails_the_run_by_default(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="half way"):
        Pipeline(_with(_Breaking(TransformConfig(stage=Stages.POST_EXPORT)))).run(
            make_context(tmp_path)
        )


@pytest.mark.parametrize("key", ["breaking", "doubling"])
def test_what_breaks_with_what_the_user_enables_is_an_error_of_the_settings(
    key: str, tmp_path: Path
) -> None:
    """Whether it is that transform, or one that another is too much for."""
    breaking = _Breaking(TransformConfig(stage=Stages.POST_EXPORT))
    breaking.error = KeyError("val")
    transforms = [*_with(_Doubling(breaking.config)), breaking]
    with pytest.raises(KeyError, match="val"):
        Pipeline(transforms).run(make_context(tmp_path))
    next(each for each in transforms if each.key == key).asked_for = True
    with pytest.raises(UsageError, match=f"breaking breaks .*'val'.*settings enable {key}: try"):
        Pipeline(transforms).run(make_context(tmp_path))


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        ({"build_model": {"enabled": False}}, "build_model.enabled is False.*Leave it True"),
        ({"load_weights": {"enabled": False}}, "load_weights.enabled is False.*Leave it True"),
        ({"load_weights": {"stage": "factory"}}, "stage is factory.*Leave it weight_load"),
        ({"export_to_gm": {"run_per_gm": True}}, "run_per_gm is True.*Leave it False"),
        ({"build_model": {"device": "foo"}}, "build_model.*'device'.*'foo'"),
    ],
)
def test_what_no_run_goes_without_stays_where_it_is(
    transforms: dict[str, Any], message: str, tmp_path: Path
) -> None:
    context = make_context(tmp_path)
    context.runtime = with_settings(context.runtime, {"transforms": transforms})
    with pytest.raises(UsageError, match=message):
        pipeline_for(context)
    as_plans_do = {"load_weights": {"enabled": False}}
    assert pipeline_for(make_context(tmp_path / "plan"), as_plans_do)


def test_clean_up_and_shape_propagation_run_when_asked_for(tmp_path: Path) -> None:
    context = make_context(tmp_path)
    doubling = _Doubling(TransformConfig(stage=Stages.POST_EXPORT, run_shape_prop=True))
    gm = Pipeline(_with(doubling)).run(context)

    assert isinstance(gm, fx.GraphModule)
    assert not nodes_of(gm, torch.ops.aten.neg)
    logits = gm.graph.output_node().args[0]
    assert isinstance(logits, fx.Node)
    assert logits.meta["val"].shape[2] == 97
    assert context.history[-1].is_clean
    assert context.history[-1].has_valid_shapes


def test_copied_graphs_share_tensors_and_keep_ties_and_persistence(tmp_path: Path) -> None:
    gm = run_only(make_context(tmp_path, tie_word_embeddings=True), EXPORT)
    randomize(gm, 3)
    twin = copy_graphs(gm)
    assert isinstance(twin, fx.GraphModule)
    inputs = random_inputs(2, 5)

    assert list(twin.state_dict()) == list(gm.state_dict())
    assert twin.get_parameter("lm_head.weight") is gm.get_parameter("lm_head.weight")
    torch.testing.assert_close(twin(*inputs), gm(*inputs), rtol=0, atol=0)
    twin.graph.output_node().args = (placeholders(twin)[0],)
    twin.recompile()
    assert gm(*inputs).is_floating_point()


def test_shapes_stay_symbolic_and_new_inputs_join_them(tmp_path: Path) -> None:
    gm = run_only(make_context(tmp_path), EXPORT)
    assert isinstance(gm, fx.GraphModule)
    node = add_placeholder(gm, "extra", torch.zeros(4, dtype=torch.int32))

    assert add_placeholder(gm, "extra", torch.zeros(4)) is node
    assert [each.target for each in placeholders(gm)] == ["input_ids", "position_ids", "extra"]
    assert node.meta["val"].fake_mode is fake_mode(gm)
    for each in gm.graph.nodes:
        if each.op not in ("placeholder", "output"):
            each.meta.pop("val", None)
    propagate_shapes(gm, torch.device("cpu"))
    logits = gm.graph.output_node().args[0].meta["val"]
    assert isinstance(logits.shape[0], torch.SymInt)
    assert isinstance(logits.shape[1], torch.SymInt)


class _Split(nn.Module):
    """Parts of a row, whose sizes its numbers decide."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        zeros = (input_ids == 0).sum()
        sizes = torch.stack([zeros, input_ids.numel() - zeros]).tolist()
        first, second = position_ids.flatten().split(sizes)
        return torch.cat([first + 1.0, second * 2.0])


def test_sizes_that_data_decide_are_propagated_and_an_input_added_after_them() -> None:
    inputs = {
        "input_ids": torch.zeros(2, 7, dtype=torch.int64),
        "position_ids": torch.arange(7).expand(2, 7).clone(),
    }
    dims = dict.fromkeys(inputs, {0: Dim.DYNAMIC, 1: Dim.DYNAMIC})
    gm = export_to_graph(_Split(), inputs, dims, torch.device("cpu"))
    propagate_shapes(gm, torch.device("cpu"))

    add_placeholder(gm, "extra", torch.zeros(8, dtype=torch.int32)[3:])
    env = fake_mode(gm).shape_env
    assert env is not None
    assert not env.pending_fresh_unbacked_symbols, (
        "torch 2.11 looks for them in every input that is added"
    )
    assert gm.graph.output_node().args[0].meta["val"].dtype == torch.float32


class _Forgetful(BaseTransform[TransformConfig]):
    key = "load_weights"

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        return gm, TransformInfo(is_clean=True)


def test_a_tensor_without_weights_after_loading_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OnboardError, match=r"no weights after loading, for example .*weight"):
        Pipeline(_with(_Forgetful(TransformConfig(stage=Stages.WEIGHT_LOAD)))).run(
            make_context(tmp_path)
        )


class _PlainAttention(BaseTransform[TransformConfig]):
    key = "plain"

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        return gm, TransformInfo(is_clean=True, has_valid_shapes=True)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_unmatched_attention_is_a_fact(tmp_path: Path, implementation: str) -> None:
    context = make_context(tmp_path, mode="hf", attn_implementation=implementation)
    Pipeline(_with(_PlainAttention(TransformConfig(stage=Stages.PATTERN_MATCHER)))).run(context)

    assert len(context.facts) == 1
    assert "2 attention calls were not matched" in context.facts[0]
