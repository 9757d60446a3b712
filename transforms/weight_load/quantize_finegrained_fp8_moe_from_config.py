"""Mixtures of experts that compute with a checkpoint's float8_e4m3fn codes and scales of blocks of 128 x 128."""

from __future__ import annotations

from onboard.graph.quantise.mixtures_from_config import QuantizeMoe
from onboard.graph.transform import register_transform


@register_transform("quantize_finegrained_fp8_moe_from_config")
class QuantizeFinegrainedFP8MoeFromConfig(QuantizeMoe):
    """Let experts compute with float8_e4m3fn codes and scales of blocks of 128 x 128."""

    op = "finegrained_fp8_moe"
