"""Scales of cached keys and values, as the checkpoint has them."""

from __future__ import annotations

import torch
from torch import fx

from onboard.graph.cache_init.interface import cache_dtype
from onboard.graph.context import TransformContext
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
    skipped,
)
from onboard.graph.weight_load.quantised_folder import quantised_checkpoint
from onboard.graph.weight_load.quantised_linears import names_in_checkpoint
from onboard.graph.weight_load.scales.cache_scales import scale_caches


@register_transform("quantize_kv_cache_from_config")
class QuantizeKVCacheFromConfig(GraphTransform[TransformConfig]):
    """Divide keys and values by the checkpoint's scales before they are cached in float8_e4m3fn.

    Keys and values that it has no scale for are cached as they are.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int | TransformInfo:
        """Count one match for each attention."""
        if context.runtime.skip_loading_weights or context.factory.mode != "graph":
            return skipped("its weights are not the checkpoint's")
        if cache_dtype(context) != torch.float8_e4m3fn:
            return skipped("keys and values are not cached in float8_e4m3fn")
        checkpoint = quantised_checkpoint(context.factory.checkpoint)
        if checkpoint is None or not checkpoint.cache_scales:
            return skipped("the checkpoint has no scales of keys and values")
        return scale_caches(gm, checkpoint, names_in_checkpoint(gm, context, checkpoint))
