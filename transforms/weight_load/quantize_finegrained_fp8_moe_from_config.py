"""Mixtures of experts that compute with the eight-bit weights of a checkpoint that have scales
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
from onboard.graph.weight_load.experts.quantised_mixtures import BLOCKS, Quantiser
from onboard.graph.weight_load.quantised_linears import (
    input_scales,
    keeps_codes,
    quantised_weights,
)


class QuantizeFinegrainedFP8MoeFromConfigConfig(TransformConfig):
    """Where codes are computed with."""

    backend: Backend = "auto"
    """auto: in 16-bit runs on a GPU; elsewhere weights are decoded as they are read."""


@register_transform("quantize_finegrained_fp8_moe_from_config")
class QuantizeFinegrainedFP8MoeFromConfig(
    GraphTransform[QuantizeFinegrainedFP8MoeFromConfigConfig]
):
    """Let experts compute with float8_e4m3fn codes and scales of blocks of 128 x 128, as the checkpoint has them.

    A mixture whose experts are not quantised alike is decoded, which is a fact.
    """

    config_class = QuantizeFinegrainedFP8MoeFromConfigConfig

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int | TransformInfo:
        """Count one match for each mixture."""
        if not keeps_codes(self.config.backend, context, self.key):
            return SKIPPED
        scales = input_scales(context, allow_different=False)
        quantiser = Quantiser(gm, quantised_weights(gm, context), BLOCKS, scales)
        count = quantiser.run()
        context.facts.extend(f"{self.key}: {fact}" for fact in quantiser.facts())
        return count
