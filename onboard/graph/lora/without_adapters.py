"""A graph without what adapters add, for steps whose requests have none."""

from __future__ import annotations

import torch
from torch import fx, nn

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.fx import nodes_of

_ops = torch.ops.onboard


def without_adapters(gm: nn.Module) -> fx.GraphModule | None:
    """Return the same graph without the calls that add what adapters add, with the same inputs and
    the same tensors; None where it has no such calls.
    """
    if not isinstance(gm, fx.GraphModule) or not nodes_of(gm, _ops.torch_lora, _ops.triton_lora):
        return None
    graph = fx.Graph()
    result = graph.graph_copy(gm.graph, {})
    assert result is not None
    graph.output(result)
    plain = fx.GraphModule(gm, graph)
    for call in nodes_of(plain, _ops.torch_lora, _ops.triton_lora):
        outputs = call.args[0]
        assert isinstance(outputs, fx.Node)
        call.replace_all_uses_with(outputs)
        plain.graph.erase_node(call)
    plain.recompile()
    return plain
