"""What a model file says of its layers: taken off the exported graph, and followed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import fx, nn
from torch.export import Dim

from onboard.errors import UsageError
from onboard.graph.export.to_graph import export_to_graph
from onboard.graph.fx import op_name
from onboard.graph.shapes import propagate_shapes
from onboard.graph.sharding.detect import detect
from onboard.graph.sharding.distribution import Distribution
from onboard.graph.sharding.file_hints import FileHint, hints_of_file
from onboard.graph.sharding.rewriting import Rewriting

HIDDEN, INNER, HEADS = 8, 12, 4
CPU = torch.device("cpu")
ops = torch.ops.onboard


class FeedForward(nn.Module):
    """A gated block whose two openings are one layer, with or without hints."""

    def __init__(self, *, hinted: bool, mode: str = "colwise") -> None:
        super().__init__()
        self.fused = nn.Linear(HIDDEN, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        self.hinted, self.mode = hinted, mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.hinted:
            gate, up = self.fused(x).split_with_sizes((INNER, INNER), dim=-1)
            shape = (*x.shape[:-1], HEADS, -1)
            return x + self.down((gate.sigmoid().view(shape) * up.view(shape)).flatten(-2))
        fused = ops.torch_linear_simple(
            x, self.fused.weight, tp_mode=self.mode, layer_type="mlp", output_sizes=[INNER, INNER]
        )
        gate, up = ops.split_with_sizes(fused, [INNER, INNER], dim=-1, enable_sharding=True)
        shape = (*x.shape[:-1], HEADS, -1)
        both = ops.view(gate.sigmoid(), shape, tp_scaled_dim=2) * up.view(shape)
        down = ops.torch_linear_simple(
            both.flatten(-2), self.down.weight, tp_mode="rowwise", layer_type="mlp"
        )
        return x + ops.all_reduce(down, layer_type="mlp")


def _graph(model: nn.Module) -> fx.GraphModule:
    x = torch.empty(2, 5, HIDDEN)
    dims = {"x": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}}
    return export_to_graph(model.eval(), {"x": x}, dims, CPU)


def _calls(gm: fx.GraphModule) -> list[str]:
    return [op_name(node) for node in gm.graph.nodes if node.op == "call_function"]


def _of_rank(gm: fx.GraphModule, ranks: int = 2) -> fx.GraphModule:
    propagate_shapes(gm, CPU)
    for node, hint in detect(gm, Distribution(ranks), hints_of_file(gm)).items():
        node.meta["sharding"] = hint
    Rewriting(gm, 0, lambda hint: True).run()
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def test_the_graph_is_that_of_a_file_without_hints() -> None:
    plain, hinted = FeedForward(hinted=False), FeedForward(hinted=True)
    hinted.load_state_dict(plain.state_dict())
    graphs = [_graph(plain), _graph(hinted)]
    assert Counter(_calls(graphs[1])) == Counter(_calls(graphs[0]))
    x = torch.randn(3, 4, HIDDEN)
    expected = plain(x)
    torch.testing.assert_close(hinted(x), expected)
    torch.testing.assert_close(graphs[1](x), expected)
    assert not hints_of_file(graphs[0])
    assert hints_of_file(graphs[1]) == {
        "fused.weight": FileHint("colwise", "mlp", (INNER, INNER)),
        "down.weight": FileHint("rowwise", "mlp"),
    }


def test_hints_and_what_is_found_without_them_make_one_graph() -> None:
    found, said = (_of_rank(_graph(FeedForward(hinted=hinted))) for hinted in (False, True))
    assert Counter(_calls(said)) == Counter(_calls(found))
    assert Counter(_calls(said))["dist_all_reduce"] == 1
    shapes = {name: list(each.shape) for name, each in said.named_parameters()}
    assert shapes == {"fused.weight": [INNER, HIDDEN], "down.weight": [HIDDEN, INNER // 2]}
    assert shapes == {name: list(each.shape) for name, each in found.named_parameters()}


def test_a_layer_stays_whole_where_its_file_says_so() -> None:
    gm = _of_rank(_graph(FeedForward(hinted=True, mode="none")))
    assert gm.get_parameter("fused.weight").shape == (2 * INNER, HIDDEN)


@pytest.mark.parametrize(
    ("sizes", "least", "ranks", "expected"),
    [
        ((), (), 2, [range(4), range(4, 8)]),
        ((), (4,), 4, [range(4), range(4), range(4, 8), range(4, 8)]),
        ((), (8,), 2, [range(8), range(8)]),
        ((4, 2, 2), (1, 2, 2), 2, [(0, 1, 4, 5, 6, 7), (2, 3, 4, 5, 6, 7)]),
        ((4, 4), (), 2, [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ((), (), 3, None),
        ((), (4,), 3, None),
    ],
)
def test_outputs_are_cut_block_by_block(
    sizes: tuple[int, ...], least: tuple[int, ...], ranks: int, expected: list[range] | None
) -> None:
    cut = FileHint("colwise", "mha", sizes, least).cut(8, ranks)
    found = None if cut is None else [own.tolist() for own in cut.entries]
    assert found == (None if expected is None else [list(own) for own in expected])


def test_sizes_that_the_layer_has_not_are_refused() -> None:
    with pytest.raises(UsageError, match=r"with 8 outputs has output_sizes \[4, 2\]"):
        FileHint("colwise", "mha", (4, 2)).cut(8, 2)
