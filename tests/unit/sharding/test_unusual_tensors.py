"""Masks and sinks with other numbers of dimensions than usual, tensors of which a rank has nothing,
and heads that an index by constants takes.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import fx, nn

from onboard.graph.export.to_graph import export_to_graph
from onboard.graph.fx import nodes_of
from onboard.graph.shapes import propagate_shapes
from onboard.graph.sharding.cuts import Cut, Layout
from onboard.graph.sharding.exchange import Exchange
from onboard.graph.sharding.layer_work import mixer_signature
from onboard.graph.sharding.structure import structure
from onboard.graph.weight_load.parameters import Share

B, S, H, D = 2, 5, 4, 8


class _Attention(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        return torch.ops.onboard.torch_attention(x, x, x, attn_mask=mask, sinks=sinks)


def _node(mask: list[int], sinks: list[int]) -> fx.Node:
    inputs = tuple(torch.randn(size) for size in ([B, S, H, D], mask, sinks))
    program = torch.export.export(_Attention(), inputs)
    return next(node for node in program.graph.nodes if "torch_attention" in str(node.target))


@pytest.mark.parametrize(
    ("mask", "sinks", "expected"),
    [
        ([B, H, S, S], [H], (".h..", "h")),
        ([S, S], [H], ("..", "h")),
        ([H, S, S], [B, S, H], ("h..", "..h")),
    ],
)
def test_masks_and_sinks_are_cut_where_their_heads_are(
    mask: list[int], sinks: list[int], expected: tuple[str, str]
) -> None:
    found = mixer_signature(_node(mask, sinks))
    assert found is not None
    letters = {operand.place[0]: operand.letters for operand in found.operands}
    assert (letters["attn_mask"], letters["sinks"]) == expected
    assert letters["query"] == "..h."


def test_a_rank_may_have_nothing_of_a_tensor() -> None:
    assert Share((4, 2), {0: []}).of(torch.ones(4, 2)).shape == (0, 2)
    assert Share((4, 2), {0: [(1, 2), (3, 4)]}).of(torch.ones(4, 2)).shape == (2, 2)


class _Indexed(nn.Module):
    def __init__(self, places: list[int]) -> None:
        super().__init__()
        self.places = places

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, self.places]


@pytest.mark.parametrize("places", [[-1], [-2, -1], [1, 3, 5]])
def test_an_index_by_a_run_of_constants_takes_what_a_rank_has_of_them(places: list[int]) -> None:
    """As one key head behind the query heads: every rank finds it where it has it."""
    heads = torch.randn(B, S, 6, D)
    gm = export_to_graph(_Indexed(places), {"x": heads}, {"x": None}, torch.device("cpu"))
    propagate_shapes(gm, torch.device("cpu"))
    (node,) = nodes_of(gm, torch.ops.aten.index)
    known = structure(node)
    assert known is not None
    own = (np.arange(6), np.arange(1, 6))
    layout = Layout({2: Cut(6, own)})
    results = known.ahead(node, [layout], {})
    assert results is not None
    known.localise(node, [layout], results, rank=1)
    gm.recompile()
    torch.testing.assert_close(gm(heads[:, :, own[1]]), heads[:, :, places])


def test_an_index_by_constants_out_of_order_needs_the_dimension_whole() -> None:
    heads = torch.randn(B, S, 6, D)
    gm = export_to_graph(_Indexed([3, 1]), {"x": heads}, {"x": None}, torch.device("cpu"))
    propagate_shapes(gm, torch.device("cpu"))
    (node,) = nodes_of(gm, torch.ops.aten.index)
    known = structure(node)
    assert known is not None
    halves = Cut(6, (np.arange(3), np.arange(3, 6)))
    assert known.ahead(node, [Layout({2: halves})], {}) is None


@pytest.mark.parametrize("entries", [[], [2, 0]])
def test_a_rank_may_take_none_of_a_tensors_entries(entries: list[int]) -> None:
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    gm = fx.GraphModule(nn.Module(), graph)
    output = gm.graph.output_node()
    places = Exchange(gm, rank=0)._constant(entries, output)
    with gm.graph.inserting_before(output):
        call = (torch.ops.aten.index_select.default, (output.args[0], 0, places))
        output.args = (gm.graph.call_function(*call),)
    gm.recompile()
    given = torch.randn(4, 3)
    assert torch.equal(gm(given), given[entries])
