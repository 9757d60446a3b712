"""Each token has the adapter of its sequence, if the run has adapters."""

from __future__ import annotations

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.cache.step_buffer import ADAPTER_IDS
from onboard.graph.backends import Backend, choose_backend, fused_op
from onboard.graph.cache_init.interface import make_interface
from onboard.graph.context import TransformContext
from onboard.graph.fx import add_placeholder, nodes_of
from onboard.graph.transform import (
    SKIPPED,
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)


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
            return SKIPPED
        if context.cache is None:
            context.cache = make_interface(context)
        adapters = add_placeholder(gm, ADAPTER_IDS, context.cache.info.args[ADAPTER_IDS])
        backend = choose_backend(self.config.backend, context, self.key)
        for call in calls:
            call.target = fused_op(backend, "lora")
            call.args = (*call.args[:5], adapters)
        return len(calls)
