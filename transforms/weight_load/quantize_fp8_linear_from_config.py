"""Linear layers that compute with the eight-bit weights of a checkpoint that have scales
of rows.
"""

from __future__ import annotations

from onboard.graph.quantise.from_config import QuantizeFP8Linears
from onboard.graph.transform import register_transform


@register_transform("quantize_fp8_linear_from_config")
class QuantizeFP8LinearFromConfig(QuantizeFP8Linears):
    """Let linears compute with float8_e4m3fn codes and scales of rows, as the checkpoint has
    them.
    """

    in_blocks = False
