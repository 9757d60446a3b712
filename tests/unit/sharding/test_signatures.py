"""What ops give for a share of their inputs, beside the share of what they give for the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from onboard.graph.fx import is_op
from onboard.graph.sharding.layer_work import mixer_signature
from onboard.graph.sharding.signatures import says_dtype, signature

SHAPE = (2, 6, 4, 8)
aten = torch.ops.aten


class _Called(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


CASES: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "mean": (lambda x: x.mean(-1, keepdim=True), "abc.", "abc."),
    "mean without the dimension": (lambda x: x.mean(2), "ab.d", "abd"),
    "sum": (lambda x: x.sum((1, -1)), "a.c.", "ac"),
    "variance": (lambda x: x.var(-1, unbiased=False), "abc.", "abc"),
    "length": (lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True), "abc.", "abc."),
    "largest": (lambda x: x.amax(1), "a.cd", "acd"),
    "largest of the first": (lambda x: x.amax(0), ".bcd", "bcd"),
    "largest of all": (lambda x: x.amax(), "....", ""),
    "largest of all, kept": (lambda x: x.amax(keepdim=True), "....", "...."),
    "stack": (lambda x: torch.stack((x, 2 * x), dim=-1), "abcd", "abcd."),
    "stack in between": (lambda x: torch.stack((x, 2 * x), dim=2), "abcd", "ab.cd"),
    "flip": (lambda x: x.flip(-1), "abc.", "abc."),
    "softmax": (lambda x: x.softmax(1), "a.cd", "a.cd"),
}


def _node(function: Callable[[Tensor], Tensor], x: Tensor) -> fx.Node:
    nodes = torch.export.export(_Called(function), (x,)).graph.nodes
    return [node for node in nodes if node.op == "call_function"][-1]


def test_heads_of_gated_linear_attention_have_their_own_weights() -> None:
    """Those of `first` are its first dimension."""
    q, first = torch.randn(SHAPE), torch.randn(SHAPE[2:])

    def attended(q: Tensor, first: Tensor) -> Tensor:
        gated: Tensor = torch.ops.onboard.torch_gated_linear_attention(q, q, q, -q.exp(), first)
        return gated

    program = torch.export.export(_Called(lambda q: attended(q, first)), (q,))
    node = next(item for item in program.graph.nodes if "gated_linear" in str(item.target))
    found = mixer_signature(node)
    assert found is not None
    letters = {operand.place[0]: operand.letters for operand in found.operands}
    assert letters == dict.fromkeys(("q", "k", "v", "g"), "..h.") | {"first": "h."}
    assert found.outputs == ("..h.",)
    torch.testing.assert_close(attended(q[:, :, 1:3], first[1:3]), attended(q, first)[:, :, 1:3])


@pytest.mark.parametrize("name", CASES)
def test_dimensions_of_one_letter_are_cut_alike(name: str) -> None:
    function, before, behind = CASES[name]
    x = torch.randn(SHAPE)
    found = signature(_node(function, x))
    assert found is not None
    assert {operand.letters for operand in found.operands} == {before}
    assert found.outputs == (behind,)
    whole = function(x)
    for dim, letter in enumerate(before):
        if letter != ".":
            share = function(x.narrow(dim, 1, 1))
            torch.testing.assert_close(share, whole.narrow(behind.index(letter), 1, 1))


def test_of_new_tensors_the_dtype_alone_is_taken() -> None:
    node = _node(lambda x: x.new_ones(8), torch.randn(SHAPE))
    found = signature(node)
    assert is_op(node, aten.new_ones)
    assert says_dtype(node)
    assert found is not None
    assert (found.operands, found.outputs) == ((), (".",))
    assert not says_dtype(_node(torch.zeros_like, torch.randn(SHAPE)))


def test_a_sum_over_everything_has_no_signature() -> None:
    assert signature(_node(torch.sum, torch.randn(SHAPE))) is None
