"""Mixtures of experts that compute with a checkpoint's float8_e4m3fn codes and scales of rows."""

from __future__ import annotations

from onboard.graph.quantise.mixtures_from_config import QuantizeMoe
from onboard.graph.transform import register_transform


@register_transform("quantize_fp8_moe_from_config")
class QuantizeFP8MoeFromConfig(QuantizeMoe):
    """Let experts compute with float8_e4m3fn codes and scales of rows."""

    op = "fp8_moe"
