"""The mechanisms that the translation knows, in the order in which the language asks them."""

from __future__ import annotations

from onboard.codegen.translate.language.in_order import Mechanisms
from onboard.codegen.translate.mechanisms.activations import Activations
from onboard.codegen.translate.mechanisms.attention.biases import PositionBiases
from onboard.codegen.translate.mechanisms.attention.canonical import CanonicalOps
from onboard.codegen.translate.mechanisms.attention.causal import CausalMasks
from onboard.codegen.translate.mechanisms.attention.chosen import ChosenKeys
from onboard.codegen.translate.mechanisms.attention.compressed import CompressedKeys
from onboard.codegen.translate.mechanisms.attention.indexer import LightningIndexer
from onboard.codegen.translate.mechanisms.attention.latent import LatentAttention
from onboard.codegen.translate.mechanisms.attention.repeats import RepeatedHeads
from onboard.codegen.translate.mechanisms.attention.sdpa import CausalSdpa
from onboard.codegen.translate.mechanisms.attention.slopes import Slopes
from onboard.codegen.translate.mechanisms.attention.text_lengths import TextLengths
from onboard.codegen.translate.mechanisms.attention.windows import CutMasks, Windows
from onboard.codegen.translate.mechanisms.attention.written import WrittenAttention
from onboard.codegen.translate.mechanisms.axes import NamedAxes
from onboard.codegen.translate.mechanisms.constructors.class_tables import ClassTables
from onboard.codegen.translate.mechanisms.constructors.filled_in import FilledIn
from onboard.codegen.translate.mechanisms.constructors.foreign_values import ForeignValues
from onboard.codegen.translate.mechanisms.constructors.halved_modules import HalvedModules
from onboard.codegen.translate.mechanisms.constructors.initialised import Initialised
from onboard.codegen.translate.mechanisms.constructors.put_in_places import PutInPlaces
from onboard.codegen.translate.mechanisms.constructors.taken_away import LeftOut
from onboard.codegen.translate.mechanisms.constructors.tried import Tried
from onboard.codegen.translate.mechanisms.convolutions import CausalConvolutions, HeadConvolutions
from onboard.codegen.translate.mechanisms.counted_positions import CountedPositions
from onboard.codegen.translate.mechanisms.experts import Mixtures
from onboard.codegen.translate.mechanisms.gpu_names import GpuNames
from onboard.codegen.translate.mechanisms.layouts.last_tokens import LastTokens
from onboard.codegen.translate.mechanisms.layouts.layouts import Layouts
from onboard.codegen.translate.mechanisms.layouts.rows_by_heads import RowsByHeads
from onboard.codegen.translate.mechanisms.library_attention.flash_calls import FlashCalls
from onboard.codegen.translate.mechanisms.library_attention.multihead import TorchAttention
from onboard.codegen.translate.mechanisms.long_texts import LongTexts
from onboard.codegen.translate.mechanisms.masks.filled_slices import FilledSlices
from onboard.codegen.translate.mechanisms.masks.one_token_paths import OneTokenPaths
from onboard.codegen.translate.mechanisms.masks.padding import LayerMasks, Padding
from onboard.codegen.translate.mechanisms.masks.truths import Truths
from onboard.codegen.translate.mechanisms.numbers import Numbers
from onboard.codegen.translate.mechanisms.parts.cast_layers import CastLayers
from onboard.codegen.translate.mechanisms.parts.default_dicts import DefaultDicts
from onboard.codegen.translate.mechanisms.parts.idle_modules import IdleModules
from onboard.codegen.translate.mechanisms.parts.numbered_parts import NumberedParts
from onboard.codegen.translate.mechanisms.parts.own_entries_read import OwnEntriesRead
from onboard.codegen.translate.mechanisms.parts.picked_rows import PickedRows
from onboard.codegen.translate.mechanisms.recurrent import RecurrentMixers
from onboard.codegen.translate.mechanisms.rescaled import RescaledWeights
from onboard.codegen.translate.mechanisms.scans.empty_states import EmptyStates
from onboard.codegen.translate.mechanisms.scans.kernel_calls import KernelCalls
from onboard.codegen.translate.mechanisms.scans.loops import Loops
from onboard.codegen.translate.mechanisms.scans.written_scans import WrittenScans
from onboard.codegen.translate.mechanisms.sliced_linears import SlicedLinears
from onboard.codegen.translate.mechanisms.tables import CutTables
from onboard.codegen.translate.mechanisms.templates import Templates
from onboard.codegen.translate.mechanisms.uniform import UniformBatches

MECHANISMS = Mechanisms(
    (
        # Masks of ones and vectors of ones are gone before anything else sees them.
        GpuNames(),
        IdleModules(),
        CastLayers(),
        OwnEntriesRead(),
        NumberedParts(),
        ClassTables(),
        HalvedModules(),
        Padding(),
        UniformBatches(),
        LastTokens(),
        Tried(),
        DefaultDicts(),
        PutInPlaces(),
        ForeignValues(),
        FilledIn(),
        WrittenScans(),
        Initialised(),
        Templates(),
        Mixtures(),
        # Rows that are picked for an expert, where no op computes the mixture.
        PickedRows(),
        RescaledWeights(),
        Activations(),
        CountedPositions(),
        CutTables(),
        TextLengths(),
        LongTexts(),
        NamedAxes(),
        Numbers(),
        # What begins like attention's scores and becomes something else comes before these.
        LightningIndexer(),
        TorchAttention(),
        CutMasks(),
        WrittenAttention(),
        CausalSdpa(),
        FlashCalls(),
        RepeatedHeads(),
        Windows(),
        Slopes(),
        PositionBiases(),
        HeadConvolutions(),
        Layouts(),
        RowsByHeads(),
        ChosenKeys(),
        LayerMasks(),
        FilledSlices(),
        Truths(),
        OneTokenPaths(),
        # A mask that none of the above took is added as it is.
        CausalMasks(),
        CompressedKeys(),
        LatentAttention(),
        LeftOut(),
        EmptyStates(),
        Loops(),
        SlicedLinears(),
        KernelCalls(),
        RecurrentMixers(),
        CausalConvolutions(),
        CanonicalOps(),
    )
)
