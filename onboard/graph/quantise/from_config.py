"""What the transforms have in common that let linear layers compute with quantised weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, TypeVar

import torch
from torch import fx

from onboard.graph.backends import Backend
from onboard.graph.context import TransformContext
from onboard.graph.quantise.coded_linears import CodedLinears
from onboard.graph.quantise.schemes import Read, Schemes
from onboard.graph.quantise.split_linears import split_linears
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    skipped,
)
from onboard.graph.weight_load.quantised_folder import quantised_checkpoint
from onboard.graph.weight_load.quantised_linears import (
    input_scales,
    keeps_codes,
    quantise_linears,
    quantised_weights,
)
from onboard.quantised.weight import QuantisedWeight


class QuantizeLinearsConfig(TransformConfig):
    """Where codes are computed with."""

    backend: Backend = "auto"
    """auto: in 16-bit runs on a GPU; elsewhere weights are decoded as they are read."""


ConfigT = TypeVar("ConfigT", bound=QuantizeLinearsConfig)


class QuantizeLinears(GraphTransform[ConfigT]):
    """Let linears compute with the checkpoint's codes, where the run has kernels for them or is to
    quantise.

    Layers that were joined before stay so where all their parts are quantised alike.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int | TransformInfo:
        """Count one match for each linear layer."""
        if not keeps_codes(self.config.backend, context, self.key):
            return skipped("the run computes with the weights decoded")
        weights = quantised_weights(gm, context)
        split_linears(gm, weights, schemes_of(context).of)
        return self.quantise(gm, weights, context)

    @abstractmethod
    def quantise(
        self, gm: fx.GraphModule, weights: Mapping[str, QuantisedWeight], context: TransformContext
    ) -> int:
        """Let linears compute with those of the weights that are this transform's; return how many
        do.
        """


class QuantizeFP8LinearsConfig(QuantizeLinearsConfig):
    """Where codes are computed with, and inputs' scales."""

    allow_different_input_scales: bool = False
    """Joined layers whose checkpoint has different scales for their one input share the largest;
    without, they are computed one by one.
    """


class QuantizeFP8Linears(QuantizeLinears[QuantizeFP8LinearsConfig]):
    """Let linears compute with codes in float8_e4m3fn with one kind of scales."""

    config_class = QuantizeFP8LinearsConfig
    in_blocks: ClassVar[bool]
    """Scales are of blocks of 128 x 128, else of rows."""

    def quantise(
        self, gm: fx.GraphModule, weights: Mapping[str, QuantisedWeight], context: TransformContext
    ) -> int:
        """Let linears compute with the weights of its scales; return how many do."""
        scales = input_scales(context, allow_different=self.config.allow_different_input_scales)
        count = quantise_linears(gm, weights, scales, in_blocks=self.in_blocks)
        context.facts.extend(filter(None, [scales.fact()]))
        return count


class QuantizeCodedLinears(QuantizeLinears[QuantizeLinearsConfig]):
    """Let linears compute with codes of four bits of one kind, or with integers of eight, as the
    checkpoint has them; inputs stay as they are, but for integers' that the checkpoint quantises.
    """

    config_class = QuantizeLinearsConfig
    kind: ClassVar[str]
    """As `QuantisedWeight.computed_as` has it."""

    def quantise(
        self, gm: fx.GraphModule, weights: Mapping[str, QuantisedWeight], context: TransformContext
    ) -> int:
        """Let linears compute with the weights of its kind; return how many do."""
        if not any(weight.computed_as == self.kind for weight in weights.values()):
            return 0
        return CodedLinears(gm, weights, self.kind, schemes_of(context), context.dtype).quantise()


def schemes_of(context: TransformContext) -> Schemes:
    """Return the schemes of the weights that a run computes with."""
    return Schemes(_reader(context), input_scales(context, allow_different=False).read)


def _reader(context: TransformContext) -> Read:
    checkpoint = quantised_checkpoint(context.factory.checkpoint)
    if context.runtime.quantize != "none" or checkpoint is None:
        return _not_stored
    return checkpoint.part


def _not_stored(weight: QuantisedWeight, role: str) -> torch.Tensor:
    raise AssertionError(f"{weight.name} has no {role} before it is loaded")
