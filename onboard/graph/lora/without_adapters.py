"""A graph without what adapters add, for steps whose requests have none."""

from __future__ import annotations

import torch
from torch import fx, nn

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.fx import arguments, nodes_of, replace_with
from onboard.graph.new_nodes import insert_call
from onboard.graph.post_load_fusion.fused_linears import fused_linears, replace_fused

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
        _take_out(plain, call)
    plain.recompile()
    return plain


def _take_out(gm: fx.GraphModule, call: fx.Node) -> None:
    """Let a linear layer do what a call does besides."""
    linear, activation = (arguments(call)[name] for name in ("outputs", "activation"))
    if not activation:
        call.replace_all_uses_with(linear)
        gm.graph.erase_node(call)
    elif linear in fused_linears(gm, "triton"):
        replace_fused(gm, linear, call, arguments(linear) | {"activation": activation})
    else:
        gate = insert_call(
            gm, call, _ops.triton_silu_and_mul.default, linear, activation, like=call
        )
        replace_with(call, gate)
