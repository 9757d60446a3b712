"""Linear layers that compute with a checkpoint's integers of four bits."""

from __future__ import annotations

from onboard.graph.quantise.from_config import QuantizeCodedLinears
from onboard.graph.transform import register_transform


@register_transform("quantize_int4_linear_from_config")
class QuantizeInt4LinearFromConfig(QuantizeCodedLinears):
    """Let linears compute with integers of four bits."""

    kind = "int4"
