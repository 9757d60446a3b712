"""Mixtures of experts that compute with a checkpoint's integers of eight bits."""

from __future__ import annotations

from onboard.graph.quantise.mixtures_from_config import QuantizeMoe
from onboard.graph.transform import register_transform


@register_transform("quantize_int8_moe_from_config")
class QuantizeInt8MoeFromConfig(QuantizeMoe):
    """Let experts compute with integers of eight bits, with inputs as integers where the
    checkpoint's scheme has them.
    """

    op = "int8_moe"
