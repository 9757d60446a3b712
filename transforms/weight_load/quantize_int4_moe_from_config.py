"""Mixtures of experts that compute with a checkpoint's integers of four bits."""

from __future__ import annotations

from onboard.graph.quantise.mixtures_from_config import QuantizeMoe
from onboard.graph.transform import register_transform


@register_transform("quantize_int4_moe_from_config")
class QuantizeInt4MoeFromConfig(QuantizeMoe):
    """Let experts compute with integers of four bits."""

    op = "int4_moe"
