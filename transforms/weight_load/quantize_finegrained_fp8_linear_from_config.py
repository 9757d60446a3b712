"""Linear layers that compute with the eight-bit weights of a checkpoint that have scales
of blocks of 128 x 128.
"""

from __future__ import annotations

from torch import fx

from onboard.graph.backends import Backend
from onboard.graph.context import TransformContext
from onboard.graph.transform import (
    SKIPPED,
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)
from onboard.graph.weight_load.quantised_linears import (
    input_scales,
    keeps_codes,
    quantise_linears,
    quantised_weights,
)


class QuantizeFinegrainedFP8LinearFromConfigConfig(TransformConfig):
    """Where codes are computed with."""

    backend: Backend = "auto"
    """auto: in 16-bit runs on a GPU; elsewhere weights are decoded as they are read."""
    allow_different_input_scales: bool = False
    """Joined layers whose checkpoint has different scales for their one input share the largest;
    without, they are computed one by one.
    """


@register_transform("quantize_finegrained_fp8_linear_from_config")
class QuantizeFinegrainedFP8LinearFromConfig(
    GraphTransform[QuantizeFinegrainedFP8LinearFromConfigConfig]
):
    """Let linears compute with float8_e4m3fn codes and scales of blocks of 128 x 128, as the checkpoint has
    them.

    Layers that were joined before stay so where all their parts are quantised alike.
    """

    config_class = QuantizeFinegrainedFP8LinearFromConfigConfig

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int | TransformInfo:
        """Count one match for each linear layer."""
        if not keeps_codes(self.config.backend, context, self.key):
            return SKIPPED
        scales = input_scales(context, allow_different=self.config.allow_different_input_scales)
        count = quantise_linears(gm, quantised_weights(gm, context), scales, in_blocks=True)
        context.facts.extend(filter(None, [scales.fact()]))
        return count
