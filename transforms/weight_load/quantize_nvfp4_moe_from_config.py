"""Mixtures of experts that compute with a checkpoint's NVFP4."""

from __future__ import annotations

from onboard.graph.quantise.mixtures_from_config import QuantizeMoe
from onboard.graph.transform import register_transform


@register_transform("quantize_nvfp4_moe_from_config")
class QuantizeNVFP4MoeFromConfig(QuantizeMoe):
    """Let experts compute with NVFP4: floats of four bits whose groups of 16 have a float8_e4m3fn scale."""

    op = "nvfp4_moe"
