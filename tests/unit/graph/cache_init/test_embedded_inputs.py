"""The graph for steps with images: attention that rotates by itself learns of blocks, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import onboard.ops  # noqa: F401
from onboard.graph.cache_init.embedded_inputs import _attend_in_blocks
from tests.support.ops.naive import relative_error
from tests.support.ops.rotated import TURNS, with_rotation
from tests.support.ops.seeds import seeded

ops: Any = torch.ops.onboard


def _graph(arguments: list[Any], named: dict[str, Any]) -> fx.GraphModule:
    graph = fx.Graph()
    places = tuple(graph.placeholder(f"given_{i}") for i in range(len(arguments)))
    node = graph.call_function(ops.torch_cached_rope_attention.default, places, named)
    node.meta["val"] = ops.torch_cached_rope_attention(*_copies(arguments), **named)
    graph.output(node)
    return fx.GraphModule(torch.nn.Module(), graph)


def _copies(arguments: list[Any]) -> list[Any]:
    return [each.clone() for each in arguments]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("turns", TURNS)
def test_attention_that_rotates_knows_blocks(turns: str, flat: bool) -> None:
    """Without a block it is what it was; in a block a token sees what comes behind it."""
    seeded()
    lengths = [(5, 5), (7, 20)]
    _, arguments, named, _ = with_rotation(lengths, turns, 16, flat, heads=6, dim=24)
    gm = _graph(arguments, named)
    expected = gm(*_copies(arguments))
    _attend_in_blocks(gm)
    gm.recompile()
    blocks = torch.full((12,), -1, dtype=torch.int32)
    assert relative_error(gm(*_copies(arguments), blocks), expected) < 1e-6
    blocks[2:4] = 0
    changed = (gm(*_copies(arguments), blocks) - expected).abs().amax((0, 2, 3)) > 1e-4
    assert changed.tolist() == [i == 2 for i in range(12)]
