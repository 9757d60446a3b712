"""Stacked experts of which a few rows are exported: which modules are taken for such, and what a
graph may do with their weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onboard.ops  # noqa: F401  (registers the canonical ops)
from onboard.graph.export.few_rows import check_stacks, few_rows, find_stacks
from onboard.graph.export.layer_kinds import ExpertStack, UnlikeError
from onboard.graph.export.to_graph import export_to_graph

EXPERTS, HIDDEN, WIDE = 8, 6, 4
Rows = Callable[[torch.Tensor], list[torch.Tensor]]


class Experts(nn.Module):
    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, HIDDEN, 2 * WIDE, device="meta"))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDE, HIDDEN, device="meta"))
        self.rows = rows

    def forward(self, x: torch.Tensor) -> Any:
        up = self.up.transpose(1, 2)
        w1, w3 = self.rows(up[:, ::2]), self.rows(up[:, 1::2])
        w2 = list(self.down.transpose(1, 2).unbind())
        chosen = torch.zeros(x.shape[0], 2, dtype=torch.int64)
        return torch.ops.onboard.torch_moe(x, chosen, torch.ones_like(chosen) * 0.5, w1, w2, w3)


class Model(nn.Module):
    def __init__(self, rows: Rows = lambda weights: list(weights.unbind())) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, device="meta")
        self.experts = Experts(rows)

    def forward(self, x: torch.Tensor) -> Any:
        return self.experts(x) + self.router(x).sum()


def graph_of(model: nn.Module) -> tuple[torch.fx.GraphModule, tuple[ExpertStack, ...]]:
    stacks = find_stacks(model, 2)
    with few_rows(model, stacks):
        graph = export_to_graph(
            model, {"x": torch.ones(5, HIDDEN)}, {"x": None}, torch.device("cpu")
        )
    return graph, stacks


def test_a_graph_of_stacked_experts_has_a_few_rows_and_the_model_all() -> None:
    model = Model()
    graph, stacks = graph_of(model)
    assert stacks == (ExpertStack("experts", EXPERTS, 2),)
    check_stacks(graph, stacks)
    assert graph.experts.up.shape == (2, HIDDEN, 2 * WIDE)  # type: ignore[union-attr]
    assert model.experts.up.shape[0] == EXPERTS


def test_rows_that_no_number_of_few_makes_up_stay() -> None:
    assert find_stacks(Model(), 3) == ()
    assert find_stacks(Model(), EXPERTS) == ()


@pytest.mark.parametrize(
    "rows",
    [
        lambda weights: list((weights - weights.mean(0)).unbind()),  # rows know of one another
        lambda weights: list(weights.unbind())[::-1],
        lambda weights: [weights.unbind()[0], *weights.unbind()[:-1]],
        lambda weights: list(weights[1:].unbind()),
        lambda weights: [each * 2 for each in weights.unbind()],
    ],
)
def test_other_uses_are_refused(rows: Rows) -> None:
    graph, stacks = graph_of(Model(rows))
    with pytest.raises(UnlikeError, match="stacked experts"):
        check_stacks(graph, stacks)
