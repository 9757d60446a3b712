"""Mixtures of experts that compute with a checkpoint's MXFP4."""

from __future__ import annotations

from onboard.graph.quantise.mixtures_from_config import QuantizeMoe
from onboard.graph.transform import register_transform


@register_transform("quantize_mxfp4_moe_from_config")
class QuantizeMXFP4MoeFromConfig(QuantizeMoe):
    """Let experts compute with MXFP4: floats of four bits whose groups of 32 have a power of two."""

    op = "mxfp4_moe"
