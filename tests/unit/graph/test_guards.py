"""A graph is only right for the sizes for which its model's code would have taken the same path."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from onboard.graph.export import export_to_graph
from onboard.graph.guards import broken_guard


class _Branching(nn.Module):
    def __init__(self, is_long: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 4)
        self.is_long = is_long

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids + position_ids)
        return hidden * 2 if self.is_long(input_ids) else hidden


def _exported(is_long: Callable[[torch.Tensor], bool]) -> fx.GraphModule:
    ids = torch.arange(33).view(3, 11)
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    inputs = {"input_ids": ids, "position_ids": torch.arange(11).expand(3, 11).contiguous()}
    return export_to_graph(_Branching(is_long), inputs, dict.fromkeys(inputs, dynamic), torch.device("cpu"))


@pytest.mark.parametrize(
    ("is_long", "first"),
    [
        (lambda ids: ids.shape[1] > 64, 65),
        (lambda ids: ids.shape[1] >= 512, 512),
        (lambda ids: ids.shape[0] * ids.shape[1] > 3000, 1023),  # three rows
    ],
)
def test_a_branch_on_the_length_is_found(is_long: Callable[[torch.Tensor], bool], first: int) -> None:
    gm = _exported(is_long)
    found = broken_guard(gm, 2048)
    assert found is not None
    assert found[1] >= first
    assert is_long(torch.empty(3, found[1]))
    assert broken_guard(gm, first - 5 if first < 1000 else 900) is None


@pytest.mark.parametrize("is_long", [lambda ids: False, lambda ids: ids.shape[0] > 64, lambda ids: ids.shape[1] < 3])
def test_what_longer_rows_do_not_change_is_no_finding(is_long: Callable[[torch.Tensor], bool]) -> None:
    assert broken_guard(_exported(is_long), 1 << 20) is None
