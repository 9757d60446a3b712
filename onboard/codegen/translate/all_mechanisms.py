"""The mechanisms that the translation knows, in the order in which the language asks them."""

from __future__ import annotations

from onboard.codegen.translate.activations import Activations
from onboard.codegen.translate.biases import PositionBiases
from onboard.codegen.translate.blocks import Templates
from onboard.codegen.translate.canonical import CanonicalOps
from onboard.codegen.translate.causal import CausalMasks, Padding
from onboard.codegen.translate.chosen import ChosenKeys
from onboard.codegen.translate.compressed import CompressedKeys
from onboard.codegen.translate.convolutions import CausalConvolutions
from onboard.codegen.translate.folded import FoldedHeads
from onboard.codegen.translate.indexer import LightningIndexer
from onboard.codegen.translate.latent import LatentAttention
from onboard.codegen.translate.loops import Loops
from onboard.codegen.translate.mechanisms import Mechanisms
from onboard.codegen.translate.positions import CountedPositions
from onboard.codegen.translate.recurrent import RecurrentMixers
from onboard.codegen.translate.repeats import RepeatedHeads
from onboard.codegen.translate.rescaled import RescaledWeights
from onboard.codegen.translate.scores import WrittenAttention
from onboard.codegen.translate.uniform import UniformBatches
from onboard.codegen.translate.windows import Windows

MECHANISMS = Mechanisms(
    (
        # Masks of ones and vectors of ones are gone before anything else sees them.
        Padding(),
        UniformBatches(),
        Templates(),
        RescaledWeights(),
        Activations(),
        CountedPositions(),
        # What begins like attention's scores and becomes something else comes before these.
        LightningIndexer(),
        WrittenAttention(),
        RepeatedHeads(),
        Windows(),
        PositionBiases(),
        FoldedHeads(),
        ChosenKeys(),
        # A mask that none of the above took is added as it is.
        CausalMasks(),
        CompressedKeys(),
        LatentAttention(),
        Loops(),
        RecurrentMixers(),
        CausalConvolutions(),
        CanonicalOps(),
    )
)
