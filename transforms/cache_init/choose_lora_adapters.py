"""Each token has the adapter of its sequence, if the run has adapters."""

from __future__ import annotations

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.cache.step_buffer import ADAPTER_IDS
from onboard.graph.backends import Backend, choose_backend, fused_op
from onboard.graph.cache_init.interface import make_interface
from onboard.graph.context import TransformContext
from onboard.graph.fx import add_placeholder, arguments, is_op, nodes_of, only_user, replace_with
from onboard.graph.new_nodes import infer_value
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
    skipped,
)
from onboard.ops.linear.activation import KERNEL_ACTIVATIONS

_ops = torch.ops.onboard


class ChooseLoraAdaptersConfig(TransformConfig):
    """What computes them."""

    backend: Backend = "auto"


@register_transform("choose_lora_adapters")
class ChooseLoraAdapters(GraphTransform[ChooseLoraAdaptersConfig]):
    """Give each `torch_lora` the step's adapters, one for each token, and the run's back end."""

    config_class = ChooseLoraAdaptersConfig

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int | TransformInfo:
        """Count one match for each call."""
        calls = nodes_of(gm, torch.ops.onboard.torch_lora)
        if not calls:
            return skipped("the run has no adapters")
        if context.cache is None:
            context.cache = make_interface(context)
        adapters = add_placeholder(gm, ADAPTER_IDS, context.cache.info.args[ADAPTER_IDS])
        backend = choose_backend(self.config.backend, context, self.key)
        for call in calls:
            call.target = fused_op(backend, "lora")
            call.args = (*call.args[:5], adapters)
            if backend == "triton":
                _take_in_gate(call)
        return len(calls)


def _take_in_gate(call: fx.Node) -> None:
    """Let a call activate its first half and multiply it with the second, if all that reads it is
    that, and the halves are layers of their own or of one.
    """
    gate, sizes = only_user(call), arguments(call)["sizes"]
    if gate is None or not is_op(gate, _ops.torch_silu_and_mul, _ops.triton_silu_and_mul):
        return
    activation = arguments(gate)["activation"]
    if activation in KERNEL_ACTIVATIONS and len(sizes) <= 2 and sizes[0] == sizes[-1]:
        call.args = (*call.args, activation)
        infer_value(call)
        replace_with(gate, call)
