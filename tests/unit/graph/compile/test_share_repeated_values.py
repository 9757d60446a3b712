"""What layers compute alike is computed once, and what changes in between is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from transformers import AutoConfig, AutoModelForCausalLM

from onboard import LLM
from tests.support.checkpoints import save_tokenizer
from tests.support.graph.fusion import apply, exported, targets

aten = torch.ops.aten
KEY = "share_repeated_values"


class Identity(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()


def graph(build: Callable[[fx.Graph, fx.Node], fx.Node]) -> fx.GraphModule:
    """A graph of `build(graph, x)`."""
    gm = exported(Identity(), 2, 3, 8)
    tanh = next(node for node in gm.graph.nodes if node.op == "call_function")
    with gm.graph.inserting_before(next(iter(tanh.users))):
        result = build(gm.graph, tanh)
    tanh.replace_all_uses_with(
        result, delete_user_cb=lambda user: user.op == "output" and user is not result
    )
    gm.recompile()
    return gm


def test_the_same_calls_are_one() -> None:
    def build(g: fx.Graph, x: fx.Node) -> fx.Node:
        cats = [g.call_function(aten.cat.default, ([x, x], -1)) for _ in range(3)]
        twice = [g.call_function(aten.relu.default, (each,)) for each in cats]
        return g.call_function(aten.cat.default, (twice, 0))

    gm = graph(build)
    x = torch.randn(2, 3, 8)
    expected = gm(x)
    new, info, _ = apply(KEY, gm, shapes=False)
    assert info.num_matches == 4
    assert sorted(targets(new)) == ["cat.default", "cat.default", "relu.default", "tanh.default"]
    assert torch.equal(new(x), expected)


def test_other_arguments_are_other_values() -> None:
    def build(g: fx.Graph, x: fx.Node) -> fx.Node:
        scaled = [g.call_function(aten.mul.Scalar, (x, number)) for number in (1, 1.0, True, 2)]
        casts = [
            g.call_function(aten.to.dtype, (x, dtype)) for dtype in (torch.float64, torch.float32)
        ]
        return g.call_function(aten.cat.default, ([*scaled, casts[1]], 0))

    _, info, _ = apply(KEY, graph(build), shapes=False)
    assert info.num_matches == 0


@pytest.mark.parametrize("through_view", [False, True])
def test_what_is_written_into_in_between_is_read_again(through_view: bool) -> None:
    def build(g: fx.Graph, x: fx.Node) -> fx.Node:
        own = g.call_function(aten.clone.default, (x,))
        before = g.call_function(aten.neg.default, (own,))
        target = g.call_function(aten.view.default, (own, [-1])) if through_view else own
        g.call_function(aten.add_.Scalar, (target, 1))
        after = g.call_function(aten.neg.default, (own,))
        return g.call_function(aten.cat.default, ([before, after], 0))

    gm = graph(build)
    x = torch.randn(2, 3, 8)
    expected = gm(x)
    new, info, _ = apply(KEY, gm, shapes=False)
    assert info.num_matches == 0
    assert torch.equal(new(x), expected)


def test_random_numbers_are_drawn_as_often() -> None:
    def build(g: fx.Graph, x: fx.Node) -> fx.Node:
        drawn = [g.call_function(aten.rand_like.default, (x,)) for _ in range(2)]
        return g.call_function(aten.cat.default, (drawn, 0))

    _, info, _ = apply(KEY, graph(build), shapes=False)
    assert info.num_matches == 0


def test_layers_share_the_tables_of_their_rotation(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 16, "head_dim": 16, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    heads["num_experts_per_tok"] = 1
    config = AutoConfig.for_model("gpt_oss", **sizes, **heads, num_hidden_layers=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    llm = LLM(str(tmp_path), device="cpu", dtype="float32", config={"max_seq_len": 64})
    matches = {entry.key: entry.num_matches for entry in llm.engine.history}
    assert matches[KEY] == 6  # cos and sin of three layers
