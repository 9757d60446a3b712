"""Low-rank adapters behind the linear layers that they are for, if the run has adapters."""

from __future__ import annotations

from pathlib import Path

from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.lora.adapted_linears import adapt_linears
from onboard.graph.lora.adapter_files import open_adapter
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
    skipped,
)


@register_transform("add_lora_adapters")
class AddLoraAdapters(GraphTransform[TransformConfig]):
    """Put `torch_lora` behind linear layers, with the matrices of all adapters that are for them.

    Joined layers have one call; a feed-forward block that an adapter is for is written out. The
    layers' own weights, with codes or without, stay as they are.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int | TransformInfo:
        """Count one match for each call."""
        if not context.runtime.lora:
            return skipped("the run has no adapters")
        adapters = [open_adapter(name, Path(at)) for name, at in context.runtime.lora.items()]
        return adapt_linears(gm, adapters, context.dtype)
