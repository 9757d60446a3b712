"""A count of tokens in a row of several texts begins anew with each text."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from onboard.graph.context import TransformContext
from onboard.graph.export.to_graph import export_to_graph
from onboard.graph.transform import get_transform
from tests.support.graph.harness import settled_config

Formula = Callable[[Tensor, nn.Embedding], Tensor]


class _Counting(nn.Module):
    def __init__(self, formula: Formula) -> None:
        super().__init__()
        self.embed, self.table, self.formula = nn.Embedding(9, 6), nn.Embedding(64, 6), formula

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.formula(self.embed(input_ids), self.table)


def _temperature(hidden: Tensor, _: nn.Embedding) -> Tensor:
    counted = torch.arange(hidden.shape[1], device=hidden.device).float() + 1.0
    scales = torch.log1p(torch.floor(counted / 4)) * 0.1 + 1.0
    return hidden * scales.view(1, -1, 1).expand(hidden.shape[0], hidden.shape[1], 1)


def _learned(hidden: Tensor, table: nn.Embedding) -> Tensor:
    return hidden + table(torch.arange(hidden.shape[1]))


def _double(hidden: Tensor, _: nn.Embedding) -> Tensor:
    return hidden * torch.arange(hidden.shape[1], dtype=torch.float64).view(1, -1, 1)


def _distances(hidden: Tensor, _: nn.Embedding) -> Tensor:
    counted = torch.arange(hidden.shape[1])
    return (counted[:, None] == counted).float() @ hidden


def _doubled_distances(hidden: Tensor, _: nn.Embedding) -> Tensor:
    doubled = torch.arange(hidden.shape[1]) * 2
    return (doubled[:, None] == doubled).float() @ hidden


def _rows(hidden: Tensor, _: nn.Embedding) -> Tensor:
    return hidden[:, torch.arange(hidden.shape[1])]


def _transformed(formula: Formula, first: int) -> tuple[_Counting, torch.fx.GraphModule, int]:
    model = _Counting(formula).eval().requires_grad_(False)
    inputs = {
        "input_ids": torch.zeros(2, 7, dtype=torch.int64),
        "position_ids": torch.arange(7).expand(2, 7).clone(),
    }
    dims = dict.fromkeys(inputs, {0: Dim.DYNAMIC, 1: Dim.DYNAMIC})
    gm = export_to_graph(model, inputs, dims, torch.device("cpu"))
    factory = SimpleNamespace(first_position=first)
    context = TransformContext(factory, settled_config(), torch.device("cpu"), torch.float32)  # type: ignore[arg-type]
    for key, stage in (
        ("cleanup_input_constraints", "post_export"),
        ("replace_counted_positions", "cache_init"),
    ):
        cls = get_transform(key)
        module, info = cls(cls.config_class(stage=stage)).apply(gm, context)
    assert isinstance(module, torch.fx.GraphModule)
    module.recompile()
    return model, module, info.num_matches


@pytest.mark.parametrize("formula", [_temperature, _learned, _double])
@pytest.mark.parametrize("first", [0, 2])
def test_each_text_of_a_row_is_counted_by_itself(formula: Formula, first: int) -> None:
    model, gm, matches = _transformed(formula, first)
    assert matches == 1
    texts = [torch.randint(9, (1, 5)), torch.randint(9, (1, 9))]
    positions = torch.cat([torch.arange(5), torch.arange(9)])[None] + first
    expected = torch.cat([model(text, positions) for text in texts], dim=1)
    torch.testing.assert_close(gm(torch.cat(texts, dim=1), positions), expected)


@pytest.mark.parametrize("formula", [_distances, _doubled_distances, _rows])
def test_places_in_the_row_stay(formula: Formula) -> None:
    model, gm, matches = _transformed(formula, 0)
    assert matches == 0
    inputs = torch.randint(9, (1, 5)), torch.tensor([[3, 4, 0, 1, 2]])
    torch.testing.assert_close(gm(*inputs), model(*inputs))
