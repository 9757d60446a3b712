"""Biases that a mixture adds behind its experts are added by one rank each, however it is divided."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import fx, nn
from torch.export import Dim

from onboard.graph.export.to_graph import export_to_graph
from onboard.graph.fx import arguments, is_op
from onboard.graph.shapes import propagate_shapes
from onboard.graph.sharding.detect import detect
from onboard.graph.sharding.distribution import Distribution
from onboard.graph.sharding.rewriting import Rewriting
from onboard.graph.weight_load.parameters import weight_plan

HIDDEN, INNER, EXPERTS = 8, 12, 4
CPU = torch.device("cpu")
ops = torch.ops.onboard


class Mixture(nn.Module):
    """Experts with biases, each in parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.opening = nn.ModuleList([nn.Linear(HIDDEN, INNER) for _ in range(EXPERTS)])
        self.closing = nn.ModuleList([nn.Linear(INNER, HIDDEN) for _ in range(EXPERTS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        return x + ops.torch_moe(
            x,
            chosen,
            weights,
            [each.weight for each in self.opening],
            [each.weight for each in self.closing],
            [],
            is_gated_mlp=False,
            act_fn="gelu",
            w1_bias=[each.bias for each in self.opening],
            w2_bias=[each.bias for each in self.closing],
        )


def _of_rank(rank: int, groups: Distribution) -> fx.GraphModule:
    dims = {"x": {0: Dim.DYNAMIC}}
    gm = export_to_graph(Mixture().eval(), {"x": torch.empty(5, HIDDEN)}, dims, CPU)
    propagate_shapes(gm, CPU)
    for node, hint in detect(gm, groups, {}).items():
        node.meta["sharding"] = hint
    Rewriting(gm, rank, lambda hint: True).run()
    return gm


@pytest.mark.parametrize(("ranks", "moe_tp"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_each_bias_is_added_by_one_rank(ranks: int, moe_tp: int) -> None:
    added: Counter[str] = Counter()
    for rank in range(ranks):
        gm = _of_rank(rank, Distribution(ranks, moe_tp=moe_tp))
        [mixture] = [node for node in gm.graph.nodes if is_op(node, ops.torch_moe)]
        own = [str(node.target) for node in arguments(mixture)["w2_bias"]]
        assert len(own) == EXPERTS * moe_tp // ranks
        added.update(name for name in own if weight_plan(gm).parts(name))
    assert added == Counter({f"closing.{expert}.bias": 1 for expert in range(EXPERTS)})
