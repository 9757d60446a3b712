"""The blocks of a spec: what kinds of classes and functions the analysis recognises, and what it
says of each.

A spec may be edited, and much of it becomes code: what stands for a name in code has a type that
    holds nothing else.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from onboard.analysis.blocks.spec_mixtures import Experts, Mixture
from onboard.analysis.blocks.spec_records import AnyBlock, Parameters
from onboard.untrusted.identifiers import (
    NAME,
    AttributePath,
    Identifier,
    Pattern,
    SelfPath,
    Variable,
)


class Plain(AnyBlock):
    """A class of which nothing is said but its place."""

    kind: Literal["causal_lm", "model", "decoder_layer", "embedding", "linear", "other"]


class RMSNormParameters(Parameters):
    """`unit_offset`: the weight is 1 + w; `weightless`: there is none."""

    eps: Identifier
    unit_offset: bool
    weightless: bool = False


class RMSNorm(AnyBlock):
    """A root-mean-square norm of the last dimension."""

    kind: Literal["rmsnorm"]
    parameters: RMSNormParameters


class LayerNormParameters(Parameters):
    """`per_head`: the weight has several dimensions."""

    eps: Identifier
    per_head: bool
    weight: SelfPath | Literal["None"]
    bias: SelfPath | Literal["None"]
    unit_offset: bool = False


class LayerNorm(AnyBlock):
    """A layer norm of the last dimension."""

    kind: Literal["layernorm"]
    parameters: LayerNormParameters


class L2NormParameters(Parameters):
    """The attribute that is added to the sum of squares."""

    eps: Identifier


class L2Norm(AnyBlock):
    """A vector divided by its length."""

    kind: Literal["l2norm"]
    parameters: L2NormParameters


class GatedNormParameters(Parameters):
    """The channels that are normalised together, and whether that comes before the gate, as
    expressions.
    """

    eps: Identifier
    group_size: Annotated[
        str, Pattern(rf"self\.weight\.shape\[0\]( // self\.{NAME})?|self\.{NAME}")
    ]
    norm_before_gate: SelfPath | Literal["True", "False"]


class GatedNorm(AnyBlock):
    """A root-mean-square norm with a SiLU gate."""

    kind: Literal["gated_rmsnorm"]
    parameters: GatedNormParameters


class RotaryParameters(Parameters):
    """`axes`: positions have several; `own_sizes`, `own_kinds`, `partly`, `some_types`: how layer
    types differ.
    """

    style: Literal["cos_sin", "half_cos_sin", "complex"]
    per_layer_type: bool
    longrope: bool
    some_types: bool = False
    own_sizes: bool = False
    own_kinds: bool = False
    partly: bool = False
    axes: bool = False


class Rotary(AnyBlock):
    """RoPE's tables."""

    kind: Literal["rotary"]
    parameters: RotaryParameters


class RopeParameters(Parameters):
    """The op, where it gives complex numbers the dimension of heads, the dimensions of tables that
    it takes whole, whether tables have each frequency once; where they have the two of each that
    become one complex number.
    """

    op: Identifier
    unsqueeze_dim: int | None = None
    table_dims: int | None = None
    half_tables: bool = False
    frequencies: Literal["side_by_side", "half_apart"] | None = None
    single: bool = False
    """It turns one tensor, by tables with each frequency once."""
    sin_first: bool = False
    """Of these, sin comes before cos."""
    uncalled: bool = False
    """Only another config's model calls it."""
    flags: tuple[bool, ...] = ()
    """The truth values behind the tensors with which it does."""


class Rope(AnyBlock):
    """A function that applies RoPE."""

    kind: Literal["rope"]
    parameters: RopeParameters


class MlpParameters(Parameters):
    """The form and the activation, by its name in transformers' table."""

    mlp: Literal["gated", "gated, fused", "plain"]
    activation: str


class Mlp(AnyBlock):
    """A feed-forward network."""

    kind: Literal["mlp"]
    parameters: MlpParameters


class AttentionParameters(Parameters):
    """Of latent attention: the method that expands latents, the linear layer by which it does."""

    expand: Identifier | None = None
    kv_b_proj: Identifier | None = None


class Attention(AnyBlock):
    """A class that calls the attention interface."""

    kind: Literal["attention"]
    parameters: AttentionParameters = Field(default_factory=AttentionParameters)


class BlockIndexerParameters(Parameters):
    """The parts of an indexer, and what its forward is given."""

    proj: Identifier
    query_norm: Identifier
    key_norm: Identifier
    block_size: Identifier
    top_k: Identifier
    x: Identifier
    tables: Identifier


class BlockIndexer(AnyBlock):
    """What chooses blocks of keys by the mean of each."""

    kind: Literal["block_indexer"]
    parameters: BlockIndexerParameters


class PoolParameters(Parameters):
    """The parts of a gated pool of tokens, and what its forward is given."""

    values: Identifier
    gates: Identifier
    bias: Identifier
    norm: Identifier
    rotary: Identifier
    overlap: bool
    rope_kind: Identifier
    x: Identifier
    positions: Identifier
    other: Identifier


class CompressorParameters(PoolParameters):
    """`indexer` chooses among its entries, and is given what `passed` says: its parameter -> the
    compressor's.
    """

    indexer: Identifier | None
    passed: dict[Identifier, Identifier]


class Compressor(AnyBlock):
    """What makes keys of blocks of tokens."""

    kind: Literal["compressor"]
    parameters: CompressorParameters


class PooledIndexerParameters(PoolParameters):
    """The layers that make queries and their weights."""

    query: AttributePath
    weights: AttributePath
    top_k: AttributePath


class PooledIndexer(AnyBlock):
    """What chooses among keys of blocks."""

    kind: Literal["pooled_indexer"]
    parameters: PooledIndexerParameters


class ScanParameters(Parameters):
    """The canonical op, and in which of the ways that it is called."""

    op: Identifier
    way: int = 0


class Scan(AnyBlock):
    """A function that is a canonical op of recurrent mixers."""

    kind: Literal["scan"]
    parameters: ScanParameters


class ScanModuleParameters(Parameters):
    """The canonical op, and the config's field that it reads."""

    op: Identifier
    eps: Identifier


class ScanModule(AnyBlock):
    """A class without weights that is a canonical op."""

    kind: Literal["scan_module"]
    parameters: ScanModuleParameters


class LoopParameters(Parameters):
    """Which loop (or stretch, by its op) of which method, the op and its arguments; `turned`: in
    which of these, and of the result, channels or heads come before the sequence.

    `joined`: the dimension along which the list that the loop fills makes up the whole; `stacked`:
    its tensors lack it. `way`: which of the op's forms of a loop.
    """

    op: Identifier
    arguments: list[Variable]
    turned: list[Variable]
    result: Identifier
    joined: int | None
    stacked: bool = False
    way: int = 0
    method: Identifier
    index: int


class Loop(AnyBlock):
    """A loop along the sequence, or a stretch of statements, that is a canonical op."""

    kind: Literal["loop"]
    parameters: LoopParameters


MaskKind = Literal["added", "square", "window", "window+1", "seen", "hidden", "ones"]
"""What a mask holds.

`added`: what is added to scores, and hides later keys. `window`: it hides what lies before the
config's window, too. `window+1`: it lets one key more be seen than the window has. `seen`: truth
values, true of the keys that a query sees. `hidden`: truth values, true of the others. `ones`: ones
for all keys, as a mask of padding has them.
"""


def _usual_masks() -> list[MaskKind]:
    return ["added"]


class MaskParameters(Parameters):
    """The kinds of the masks that it returns."""

    returns: list[MaskKind] = Field(default_factory=_usual_masks)


class Mask(AnyBlock):
    """A function or method that makes causal masks."""

    kind: Literal["mask"]
    parameters: MaskParameters = Field(default_factory=MaskParameters)


Norm = RMSNorm | LayerNorm | L2Norm | GatedNorm
Pool = Compressor | PooledIndexer
Templated = Norm | Rotary | Experts | BlockIndexer | Pool
"""Blocks that are generated from a template."""
Block = Annotated[
    Plain | Templated | Rope | Mlp | Mixture | Attention | Scan | ScanModule | Loop | Mask,
    Field(discriminator="kind"),
]
MIXTURES = ("experts", "mixture")
"""Kinds of blocks that have experts."""
_BLOCKS: TypeAdapter[Block] = TypeAdapter(Block)


def make_block(**fields: Any) -> Block:
    """Return the block that fields describe, of the class that is its kind's."""
    return _BLOCKS.validate_python(fields)
