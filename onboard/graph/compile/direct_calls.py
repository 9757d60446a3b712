"""A graph that calls the functions behind our operators instead of going through torch's
dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from onboard.graph.fx import attribute, copy_graphs
from onboard.ops.library import plain_function

_BUILT_IN: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.linear.default: F.linear,
    torch.ops.aten.narrow.default: torch.narrow,
    torch.ops.aten.reshape.default: torch.reshape,
}
"""The same operators, without the detour through their overload."""


class DirectCalls(nn.Module):
    """Runs a graph with direct calls; the graph as it was stays visible as `gm`.

    What a custom operator adds to its function (autograd, checks of schema and device) is not
    needed to infer, and costs tens of microseconds a call.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__()
        self.gm = gm
        direct = copy_graphs(gm)
        assert isinstance(direct, fx.GraphModule)
        _keep_at_hand(direct)
        self.num_calls = _redirect(direct)
        """Calls that go past the dispatcher."""
        # Hidden from `modules`: it shares every parameter and has the same graph.
        self.__dict__["_direct"] = direct

    @property
    def graph(self) -> fx.Graph:
        """The FX graph, for whoever asks for its inputs."""
        return self.gm.graph

    def forward(self, **inputs: torch.Tensor) -> Any:
        """Run one step; inputs as the graph module's placeholders."""
        return self.__dict__["_direct"](**inputs)


def directly(gm: nn.Module) -> nn.Module:
    """Return what runs a graph with direct calls; what has no graph of its own, or is compiled, as it
    is.
    """
    return DirectCalls(gm) if isinstance(gm, fx.GraphModule) else gm


def _keep_at_hand(gm: fx.GraphModule) -> None:
    """Let weights and tables be plain attributes: each step would look them up through their
    modules, one by one.
    """
    for index, node in enumerate(gm.graph.find_nodes(op="get_attr")):
        name = f"_weight_{index}"
        gm.__dict__[name] = attribute(gm, node.target)
        node.target = name


def _redirect(gm: fx.GraphModule) -> int:
    """Let every call of one of our operators call its function; return how many there are."""
    count = 0
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        function = _BUILT_IN.get(node.target) or plain_function(node.target)
        count += node.target not in _BUILT_IN and function is not node.target
        node.target = function
    gm.recompile()
    return count
