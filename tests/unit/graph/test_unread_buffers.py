"""Buffers that a graph no longer reads: checkpoints have those that the model saves."""

from __future__ import annotations

import torch
from torch import fx, nn

from onboard.graph.canonicalise import clean_up
from onboard.graph.weight_load.parameters import unread_names


class _Masked(nn.Module):
    scale: torch.Tensor
    mask: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.bias = nn.Parameter(torch.randn(4))
        self.register_buffer("mask", torch.ones(4))
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight * self.scale
        return y * self.mask + self.table + self.bias


def test_only_buffers_that_a_model_saves_are_known_of_those_that_go() -> None:
    gm = fx.symbolic_trace(_Masked())
    gm._non_persistent_buffers_set.add("table")  # which tracing forgets
    clean_up(gm)
    assert not unread_names(gm)
    product, *_ = (n for n in gm.graph.nodes if n.op == "call_function")
    output = gm.graph.output_node()
    output.args = (list(product.users)[0],)
    clean_up(gm)
    assert {name for name, _ in gm.named_buffers()} == {"scale"}
    assert unread_names(gm) == {"mask"}
    x = torch.randn(4)
    torch.testing.assert_close(gm(x), x * gm.get_parameter("weight"))
