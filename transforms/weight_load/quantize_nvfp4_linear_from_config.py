"""Linear layers that compute with a checkpoint's NVFP4: floats of four bits whose groups of 16 have a
float8_e4m3fn scale.
"""

from __future__ import annotations

from onboard.graph.quantise.from_config import QuantizeCodedLinears
from onboard.graph.transform import register_transform


@register_transform("quantize_nvfp4_linear_from_config")
class QuantizeNVFP4LinearFromConfig(QuantizeCodedLinears):
    """Let linears compute with NVFP4: floats of four bits whose groups of 16 have a float8_e4m3fn scale."""

    kind = "nvfp4"
