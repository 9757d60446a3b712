"""Linear layers that compute with a checkpoint's MXFP4: floats of four bits whose groups of 32 have a power of two."""

from __future__ import annotations

from onboard.graph.quantise.from_config import QuantizeCodedLinears
from onboard.graph.transform import register_transform


@register_transform("quantize_mxfp4_linear_from_config")
class QuantizeMXFP4LinearFromConfig(QuantizeCodedLinears):
    """Let linears compute with MXFP4: floats of four bits whose groups of 32 have a power of two."""

    kind = "mxfp4"
