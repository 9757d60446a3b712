"""Positions are moved on the device where prompts may have images, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn

from onboard.config import SettledConfig
from onboard.graph.context import TransformContext
from onboard.graph.transform import Stages, get_transform

KEY = "initialize_mrope_delta_cache"


class _Positions(nn.Module):
    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return input_ids * 100 + position_ids


@pytest.mark.parametrize(
    ("towers", "runtime", "moves"),
    [(["visual"], {}, 1), ([], {}, 0), (["visual"], {"batch_invariant": True}, 0)],
)
def test_positions_move_where_prompts_may_have_images(
    towers: list[str], runtime: Any, moves: int
) -> None:
    gm = fx.symbolic_trace(_Positions())
    for node in gm.graph.nodes:
        node.meta["val"] = torch.zeros(1, 3, dtype=torch.int64)
    factory: Any = SimpleNamespace(eager_modules=towers)
    settled = SettledConfig(max_seq_len=16, max_batch_size=2, max_num_tokens=16, **runtime)
    context = TransformContext(factory, settled, torch.device("cpu"), torch.float32)
    transform = get_transform(KEY)
    moved, info = transform(transform.config_class(stage=Stages.CACHE_INIT)).apply(gm, context)
    assert info.num_matches == moves
    if not moves:
        return
    moved.recompile()
    ids, positions = torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[4, 5, 9]])
    shifts = torch.tensor([[0], [-2], [7]])
    out = moved(
        ids, positions, torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([1, 2]), shifts
    )
    assert out.tolist() == [[2, 3, 16]]
