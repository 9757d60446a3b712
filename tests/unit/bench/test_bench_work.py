"""The floor's bytes and operations, against the model itself and torch's own counter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from onboard.bench.ceilings import measure_ceilings
from onboard.bench.expert_hits import experts_hit
from onboard.bench.measure import run_batch
from onboard.bench.shape import Shape
from onboard.bench.work import ModelWork, weights_of
from onboard.cache.orders import Order, Orders
from onboard.config import RuntimeConfig
from onboard.graph.compile.cuda_graph import CapturedDecode
from onboard.graph.compile.piecewise import PiecewiseGraph
from onboard.graph.fx import graph_modules
from onboard.runtime.build import build_engine
from onboard.runtime.engine import Engine
from tests.support.runtime.tiny import TINY, make_tiny

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}


def engine_for(folder: Path, model_type: str, **options: object) -> tuple[Engine, torch.nn.Module]:
    """An engine on the shipped file and transformers' model with the same weights."""
    made = make_tiny(folder, model_type, own_file=False, **options)
    return made.engine(max_seq_len=128, max_num_tokens=256), made.hf


def operations_of(model: torch.nn.Module, ids: torch.Tensor) -> tuple[int, int]:
    """Operations of transformers' forward on weights, and on attention scores, as torch counts
    them.
    """
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, use_cache=False, logits_to_keep=1)
    by_op = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    attention = by_op.pop("aten.bmm", 0)
    return sum(by_op.values()), attention


@pytest.mark.parametrize("tied", [False, True])
def test_dense_operations_and_bytes_are_those_of_transformers_model(
    tmp_path: Path, tied: bool
) -> None:
    engine, hf = engine_for(tmp_path, "llama", tie_word_embeddings=tied)
    work = ModelWork(weights_of(engine.gm), tuple(engine.cache.resources.values()), heads=4)
    shape = Shape(batch=3, context=29, output=8)
    linear, scores = operations_of(hf, torch.randint(97, (3, 29)))
    found = work.prefill(shape, []).operations
    # transformers' eager attention computes the whole square, of which a causal query needs the
    # lower triangle.
    assert found == pytest.approx(linear + scores * (29 + 1) / (2 * 29))
    size = sum(parameter.nbytes for parameter in hf.parameters())
    table = 97 * 32 * 4
    keys = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, channels, bytes
    rows = 3 * 32 * 4
    expected = size - (0 if tied else table) + rows + 3 * shape.mean_length * keys
    assert work.decode(shape, []).num_bytes == expected


def test_a_window_bounds_what_is_read_and_computed(tmp_path: Path) -> None:
    engine, _ = engine_for(tmp_path, "mistral", sliding_window=16)
    work = ModelWork(weights_of(engine.gm), tuple(engine.cache.resources.values()), heads=4)
    assert work.cache_bytes(100) == work.cache_bytes(16) == 16 / 8 * work.cache_bytes(8)
    seen = sum(min(i, 16) for i in range(1, 51))
    without = work.prefill(Shape(1, 0, 2), []).operations
    per_pair = 2 * 2 * 2 * 4 * 8  # layers, keys and values, multiply and add, heads, channels
    linear = 2 * 50 * work.weights.dense_elements
    assert work.prefill(Shape(1, 50, 2), []).operations - without == linear + seen * per_pair


def test_experts_are_counted_as_transformers_router_chose_them(tmp_path: Path) -> None:
    engine, hf = engine_for(tmp_path, "qwen3_moe", **EXPERTS)
    prompts = torch.randint(97, (3, 5))
    with torch.no_grad():
        routed = hf(prompts, output_router_logits=True).router_logits
    chosen = [set(logits.topk(2, dim=-1).indices.flatten().tolist()) for logits in routed]
    run_batch(engine, prompts.tolist(), 1)
    hits = experts_hit(engine)
    assert hits == [len(each) for each in chosen]
    work = ModelWork(weights_of(engine.gm), tuple(engine.cache.resources.values()), heads=4)
    each = 3 * 24 * 32 * 4
    less = work.decode(Shape(3, 5, 2), [hits[0] - 1, hits[1]]).num_bytes
    assert work.decode(Shape(3, 5, 2), hits).num_bytes - less == each
    pairs = 3 * (5 * 6 // 2)
    attention = pairs * 2 * 2 * 2 * 4 * 8
    hf.set_experts_implementation("eager")  # torch does not count grouped products
    linear, _ = operations_of(hf, prompts)
    assert work.prefill(Shape(3, 5, 2), hits).operations == linear + attention


def test_a_graph_that_runs_in_several_ways_is_counted_once(tmp_path: Path) -> None:
    engine, _ = engine_for(tmp_path, "qwen3_moe", **EXPERTS)
    ((_, graph),) = graph_modules(engine.gm)
    alone = weights_of(graph)
    for whole in (None, CapturedDecode(graph)):
        assert weights_of(PiecewiseGraph(graph, whole)) == alone


def test_other_ranks_are_told_to_choose_where_experts_are_counted(tmp_path: Path) -> None:
    # What they have captured ends with the first rank's tokens: they would wait for them forever
    engine, _ = engine_for(tmp_path, "qwen3_moe", **EXPERTS)
    run_batch(engine, torch.randint(97, (3, 5)).tolist(), 1)
    sent: list[bytes] = []
    engine.cache.orders = Orders(engine.cache.info, sent.append)
    experts_hit(engine)
    assert [order[:8] for order in sent] == [Order.CHOOSE.to_bytes(8, sys.byteorder)]


def test_states_are_read_once(tmp_path: Path) -> None:
    hf = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("mamba", **{**TINY, "state_size": 8, "pad_token_id": None})
    )
    hf.save_pretrained(tmp_path / "m")
    runtime = RuntimeConfig(device="cpu", dtype="float32", max_seq_len=64, max_num_tokens=64)
    engine = build_engine(tmp_path / "m", runtime)
    work = ModelWork(weights_of(engine.gm), tuple(engine.cache.resources.values()), heads=1)
    states = sum(cache[0].nbytes for cache in engine.cache.caches.values())
    assert work.cache_bytes(1000) == work.cache_bytes(1) == states > 0


def test_ceilings_are_no_higher_than_any_read_and_product_can_be() -> None:
    ceilings = measure_ceilings(torch.device("cpu"), torch.float32)
    assert 1e8 < ceilings.read_bandwidth < 1e13
    assert 1e8 < ceilings.matmul_rate < 1e15
    assert ceilings.seconds(ceilings.read_bandwidth, 0) == 1.0
    assert ceilings.seconds(0, 2 * ceilings.matmul_rate) == 2.0
