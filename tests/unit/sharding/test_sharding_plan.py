"""What is cut, how often ranks exchange something, and what is refused; no group is needed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from transformers import LlamaConfig

from onboard.errors import UsageError
from onboard.graph.fx import arguments, nodes_of, op_name
from onboard.graph.sharding.hints import hint_of
from onboard.graph.weight_load.parameters import weight_plan
from onboard.parallel.ranks import ALONE, Ranks
from tests.support.sharding.zoo import divided, save_family

ops = torch.ops.onboard


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("llama"), "llama", 1)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("mixtral"), "mixtral", 1)


@pytest.fixture(scope="module")
def whole_mixtral(mixtral: Path) -> fx.GraphModule:
    return divided(mixtral, ALONE)[0]


def _calls(gm: fx.GraphModule) -> Counter[str]:
    return Counter(op_name(node) for node in gm.graph.nodes)


def _shapes(gm: fx.GraphModule) -> dict[str, tuple[int, ...]]:
    return {name: tuple(each.shape) for name, each in gm.named_parameters()}


def test_one_rank_has_the_graph_as_it_is(llama: Path) -> None:
    gm, context = divided(llama, ALONE)
    assert not [name for name in _calls(gm) if name in ("dist_all_reduce", "all_gather")]
    assert not weight_plan(gm).shares
    keys = ("detect_sharding", "apply_sharding_hints", "strip_sharding_hints")
    done = [entry for entry in context.history if entry.key in keys]
    assert [entry.num_matches for entry in done] == [0, 0, 0]
    assert all(before == behind for before, behind in (entry.nodes or (0, 0) for entry in done))


def test_a_layer_has_two_sums_and_the_vocabulary_one_and_a_gather(llama: Path) -> None:
    gm, context = divided(llama, Ranks(1, 2))
    assert _calls(gm)["dist_all_reduce"] == 2 * 2 + 1
    assert _calls(gm)["all_gather"] == 1
    assert {arguments(node)["layer_type"] for node in nodes_of(gm, ops.dist_all_reduce)} == {
        "mha",
        "mlp",
        "vocabulary",
    }
    entry = next(entry for entry in context.history if entry.key == "apply_sharding_hints")
    assert entry.num_matches > 0
    assert entry.summary.startswith(f"{entry.num_matches} nodes (")
    assert not [fact for fact in context.facts if "several ranks" in fact]
    assert not [node for node in gm.graph.nodes if hint_of(node) is not None]


def test_the_gather_of_logits_comes_behind_the_head_alone(llama: Path) -> None:
    gm, _ = divided(llama, Ranks(0, 2))
    [gather] = nodes_of(gm, ops.all_gather)
    assert gm.graph.output_node().args[0] is gather


def test_parallel_branches_are_summed_once(tmp_path: Path) -> None:
    gm, _ = divided(save_family(tmp_path, "gpt_neox", 1), Ranks(0, 2))
    assert _calls(gm)["dist_all_reduce"] == 2 + 1


def test_shared_and_routed_experts_are_summed_once(tmp_path: Path) -> None:
    gm, _ = divided(save_family(tmp_path, "qwen2_moe", 1), Ranks(0, 2))
    assert _calls(gm)["dist_all_reduce"] == 2 * 2 + 1


def test_shares_are_of_heads_and_channels(llama: Path) -> None:
    whole, _ = divided(llama, ALONE)
    own, _ = divided(llama, Ranks(1, 2))
    expected = dict(_shapes(whole))
    cut_rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    for name, (rows, *columns) in _shapes(whole).items():
        if any(part in name for part in cut_rows):
            expected[name] = (rows // 2, *columns)
        elif "o_proj" in name or "down_proj" in name:
            expected[name] = (rows, columns[0] // 2)
        elif "embed_tokens" in name or "lm_head" in name:
            expected[name] = (rows // 2, *columns)  # the second of two ranks has the smaller part
    assert _shapes(own) == expected


def test_heads_that_ranks_cannot_divide_are_refused(llama: Path) -> None:
    with pytest.raises(UsageError) as refused:
        divided(llama, Ranks(0, 3))
    assert refused.value.message == "4 and 2 heads (mha) cannot be divided among 3 ranks"
    assert refused.value.hint == "World sizes that divide them: 2, 4"


def test_layers_that_are_not_chosen_stay_whole(llama: Path) -> None:
    chosen = {"apply_sharding_hints": {"shard_layers": ["mlp"]}}
    gm, _ = divided(llama, Ranks(0, 2), chosen)
    assert _calls(gm)["dist_all_reduce"] == 2
    assert {name.split(".")[-2] for name in weight_plan(gm).shares} == {
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    divided(llama, Ranks(0, 3), {"apply_sharding_hints": {"shard_layers": ["vocabulary"]}})
    with pytest.raises(UsageError, match="shard_layers names 'mha2', which the model has not"):
        divided(llama, Ranks(0, 2), {"apply_sharding_hints": {"shard_layers": ["mha2"]}})


def test_simple_shards_are_gathered_at_once(llama: Path) -> None:
    gm, _ = divided(llama, Ranks(0, 2), {"detect_sharding": {"simple_shard_only": True}})
    assert _calls(gm)["dist_all_reduce"] == 0
    # query, key, value and output; blocks are one op, and 131 words no even number
    assert _calls(gm)["all_gather"] == 2 * 4


def test_ranks_divide_experts_by_their_numbers(mixtral: Path) -> None:
    gm, _ = divided(mixtral, Ranks(1, 2))
    [first, *_] = nodes_of(gm, ops.torch_moe)
    names = [str(each.target) for each in arguments(first)["w1_weight"]]
    count = len(names)
    assert [name.split("experts.")[1].split(".")[0] for name in names] == [
        str(index) for index in range(count, 2 * count)
    ]
    assert not [name for name in weight_plan(gm).shares if "experts" in name]
    [subtracted] = [arguments(first)["selected_experts"]]
    assert op_name(subtracted) == "sub"
    assert subtracted.args[1] == count


@pytest.mark.parametrize(
    ("mapping", "experts", "channels"),
    [({"moe_tp": 4}, 1, 4), ({"moe_ep": 2}, 2, 2)],
)
def test_mixtures_are_divided_as_asked(
    mixtral: Path,
    whole_mixtral: fx.GraphModule,
    mapping: dict[str, int],
    experts: int,
    channels: int,
) -> None:
    whole = whole_mixtral
    gm, _ = divided(mixtral, Ranks(3, 4), {"detect_sharding": {"dist_mapping": mapping}})
    before, behind = (nodes_of(each, ops.torch_moe)[0] for each in (whole, gm))
    assert len(arguments(behind)["w1_weight"]) * experts == len(arguments(before)["w1_weight"])
    name = str(arguments(behind)["w2_weight"][0].target)
    assert gm.get_parameter(name).shape[1] * channels == whole.get_parameter(name).shape[1]


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"pp": 2}, "dist_mapping of detect_sharding has pp 2 and that of the run 1"),
        ({"tp": 4}, "dist_mapping has tp 4 for 2 ranks"),
        ({"moe_tp": 2, "moe_ep": 2}, "dist_mapping has moe_tp 2 and moe_ep 2 for 2 ranks"),
    ],
)
def test_a_mapping_that_does_not_fit_is_refused(
    llama: Path, mapping: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        divided(llama, Ranks(0, 2), {"detect_sharding": {"dist_mapping": mapping}})


def _large(folder: Path, **config: Any) -> Path:
    LlamaConfig(
        **{
            **{"hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256},
            **{"num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80},
            **config,
        },
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("layers", [4, pytest.param(80, marks=pytest.mark.exhaustive)])
def test_eight_ranks_of_a_large_model_are_planned_without_its_weights(
    tmp_path: Path, layers: int
) -> None:
    folder = _large(tmp_path, num_hidden_layers=layers)
    gm, context = divided(folder, Ranks(7, 8), skip_loading_weights=True)
    assert _calls(gm)["dist_all_reduce"] == 2 * layers + 1
    shapes = _shapes(gm)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (1024, 8192)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (128, 8192)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (8192, 3584)
    assert shapes["lm_head.weight"] == (16032, 8192)
    own = sum(each.numel() for each in gm.parameters())
    whole = layers * (8192 * 8192 * 2 + 8192 * 1024 * 2 + 3 * 8192 * 28672) + 2 * 128256 * 8192
    norms = (2 * layers + 1) * 8192
    assert own == whole // 8 + norms
    summaries = {entry.key: entry.summary for entry in context.history}
    assert "MiB of weights" in summaries["apply_sharding_hints"]
