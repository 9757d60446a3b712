"""Linear layers that compute with the eight-bit weights of a checkpoint that have scales
of blocks of 128 x 128.
"""

from __future__ import annotations

from onboard.graph.quantise.from_config import QuantizeFP8Linears
from onboard.graph.transform import register_transform


@register_transform("quantize_finegrained_fp8_linear_from_config")
class QuantizeFinegrainedFP8LinearFromConfig(QuantizeFP8Linears):
    """Let linears compute with float8_e4m3fn codes and scales of blocks of 128 x 128, as the checkpoint has
    them.
    """

    in_blocks = True
