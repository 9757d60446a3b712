"""What writes to a tensor that nobody else sees is replaced; what would show elsewhere is left as
it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from onboard.graph.export.functional import replace_in_place
from onboard.graph.fx import writes


def _traced(function: Callable[[Tensor], Tensor]) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(torch.randn(4, 6))


def _writes(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if node.op == "call_function" and writes(node)]


def test_a_new_tensor_is_written_to_by_making_another() -> None:
    def function(x: Tensor) -> Tensor:
        chosen = x.topk(2, dim=-1).indices
        mask = torch.zeros_like(x)
        mask.scatter_(1, chosen, 1.0)
        weights = x * 2
        before = weights + 1
        weights /= weights.sum(dim=-1, keepdim=True)
        weights.mul_(mask)
        return weights + before

    gm, x = _traced(function), torch.randn(4, 6)
    assert len(_writes(gm)) == 3
    replace_in_place(gm)
    gm.recompile()
    assert _writes(gm) == []
    torch.testing.assert_close(gm(x), function(x), rtol=0, atol=0)


def test_what_was_chosen_is_written_to_by_making_another() -> None:
    """As routers of mixtures do."""

    def function(x: Tensor) -> Tensor:
        values, chosen = x.topk(3, dim=-1)
        values /= values.sum(dim=-1, keepdim=True)
        return values * chosen

    gm, x = _traced(function), torch.randn(4, 6)
    assert len(_writes(gm)) == 1
    replace_in_place(gm)
    gm.recompile()
    assert _writes(gm) == []
    torch.testing.assert_close(gm(x), function(x), rtol=0, atol=0)


def _input(x: Tensor) -> Tensor:
    x.mul_(2)
    return x + 1


def _view(x: Tensor) -> Tensor:
    y = x + 1
    y[:, 1:].mul_(2)
    return y * 3


def _seen_by_a_view(x: Tensor) -> Tensor:
    y = x + 1
    half = y[:, :3]
    y.mul_(2)
    return half + 1


def _seen_unsaid(x: Tensor) -> Tensor:
    y = x + 1
    same = nn.functional.dropout(y, 0.5, training=False)
    y.mul_(2)
    return same + 1


def _given_back_unsaid(x: Tensor) -> Tensor:
    y = x + 1
    nn.functional.dropout(y, 0.5, training=False).mul_(2)
    return y + 1


def _part(x: Tensor) -> Tensor:
    y = x + 1
    first, _ = y.split(3, dim=1)
    first.mul_(2)
    return y + 1


def _part_unsaid(x: Tensor) -> Tensor:
    y = x + 1
    first, _ = torch.unsafe_split(y, 3, dim=1)
    first.mul_(2)
    return y + 1


def _narrower(x: Tensor) -> Tensor:
    y = (x * 3).half()
    y = y + 1
    y.mul_(torch.arange(6, dtype=torch.float32))
    return y + 1


def _result(x: Tensor) -> Tensor:
    return (x + 1).mul_(2)


@pytest.mark.parametrize(
    "function",
    [
        _input,
        _view,
        _seen_by_a_view,
        _seen_unsaid,
        _given_back_unsaid,
        _part,
        _part_unsaid,
        _narrower,
        _result,
    ],
)
def test_a_write_that_shows_elsewhere_stays(function: Callable[[Tensor], Tensor]) -> None:
    gm = torch.export.export(_Module(function), (torch.randn(4, 6),)).graph_module
    before = _writes(gm)
    assert before
    replace_in_place(gm)
    assert _writes(gm) == before


def test_one_of_several_results_that_is_taken_twice_is_seen() -> None:
    gm = _traced(lambda x: x.topk(3, dim=-1).values.mul_(2) + 1)
    taken = next(node for node in gm.graph.nodes if node.target is operator.getitem)
    (written,) = (node for node in gm.graph.nodes if node.op == "call_function" and writes(node))
    with gm.graph.inserting_after(taken):
        again = gm.graph.call_function(operator.getitem, taken.args)
    again.meta.update(taken.meta)
    for user in list(written.users):
        user.replace_input_with(written, again)
    before = _writes(gm)
    assert before
    replace_in_place(gm)
    assert _writes(gm) == before


class _Module(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)
