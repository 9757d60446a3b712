"""Linear layers that compute with a checkpoint's integers of eight bits."""

from __future__ import annotations

from onboard.graph.quantise.from_config import QuantizeCodedLinears
from onboard.graph.transform import register_transform


@register_transform("quantize_int8_linear_from_config")
class QuantizeInt8LinearFromConfig(QuantizeCodedLinears):
    """Let linears compute with integers of eight bits, with inputs as integers where the checkpoint's
    scheme has them.
    """

    kind = "int8"
