"""What the transforms have in common that let mixtures of experts compute with quantised weights."""

from __future__ import annotations

from typing import ClassVar

from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.quantise.from_config import QuantizeLinearsConfig
from onboard.graph.transform import (
    GraphTransform,
    TransformInfo,
    skipped,
)
from onboard.graph.weight_load.experts.quantised_mixtures import Quantiser
from onboard.graph.weight_load.quantised_linears import (
    input_scales,
    keeps_codes,
    quantised_weights,
)


class QuantizeMoe(GraphTransform[QuantizeLinearsConfig]):
    """Let experts compute with codes, as the checkpoint has them.

    A mixture whose experts are not quantised alike is decoded, which is a fact.
    """

    config_class = QuantizeLinearsConfig
    op: ClassVar[str]
    """The mixtures' op, without its back end."""

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int | TransformInfo:
        """Count one match for each mixture."""
        if not keeps_codes(self.config.backend, context, self.key):
            return skipped("the run computes with the weights decoded")
        scales = input_scales(context, allow_different=False)
        quantiser = Quantiser(gm, quantised_weights(gm, context), self.op, scales)
        count = quantiser.run()
        context.facts.extend(f"{self.key}: {fact}" for fact in quantiser.facts())
        return count
