"""The blocks of a spec: what kinds of classes and functions the analysis recognises, and what it
says of each.

A spec may be edited, and much of it becomes code: what stands for a name in code has a type that
    holds nothing else.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    model_serializer,
)

from onboard.untrusted.identifiers import (
    NAME,
    AttributePath,
    Identifier,
    Pattern,
    SelfPath,
    Variable,
)


class Record(BaseModel):
    """Part of a spec: no other fields, and no other values when it is changed."""

    # The schema that an editor shows beside spec.yaml says what a field means, as its docstring does.
    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, use_attribute_docstrings=True
    )


class Parameters(Record):
    """What a block's template needs."""

    def given(self) -> dict[str, Any]:
        """Return what was found, by name; what was not even looked for is left out."""
        return {key: value for key, value in self if key in self.model_fields_set}

    @model_serializer(mode="wrap")
    def _without_the_rest(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {key: value for key, value in fields.items() if key in self.model_fields_set}


class _Block(Record):
    """One class of the Hugging Face module tree that the generated file contains, or a function
    that its code calls.
    """

    class_name: Identifier
    """As in the Hugging Face source, for example `LlamaRMSNorm`."""
    kind: str
    """What it computes: each kind has parameters of its own."""
    path: str
    """Its first place in the module tree, for example `model.layers.0.mlp`."""
    source: str
    """`modeling_llama.py:120`."""
    parameters: Parameters = Field(default_factory=Parameters)
    """Names of attributes and arguments in the source, and options, as its kind asks for them."""
    evidence: list[str] = Field(default_factory=list)
    """Why its kind is believed: the probe and its error, or the line."""


class Plain(_Block):
    """A class of which nothing is said but its place."""

    kind: Literal["causal_lm", "model", "decoder_layer", "embedding", "linear", "other"]


class RMSNormParameters(Parameters):
    """`unit_offset`: the weight is 1 + w; `weightless`: there is none."""

    eps: Identifier
    unit_offset: bool
    weightless: bool = False


class RMSNorm(_Block):
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


class LayerNorm(_Block):
    """A layer norm of the last dimension."""

    kind: Literal["layernorm"]
    parameters: LayerNormParameters


class L2NormParameters(Parameters):
    """The attribute that is added to the sum of squares."""

    eps: Identifier


class L2Norm(_Block):
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


class GatedNorm(_Block):
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


class Rotary(_Block):
    """RoPE's tables."""

    kind: Literal["rotary"]
    parameters: RotaryParameters


class RopeParameters(Parameters):
    """The op, where it gives complex numbers the dimension of heads, the dimensions of tables that
    it takes whole, whether tables have each frequency once.
    """

    op: Identifier
    unsqueeze_dim: int | None = None
    table_dims: int | None = None
    half_tables: bool = False
    single: bool = False
    """It turns one tensor, by tables with each frequency once."""
    sin_first: bool = False
    """Of these, sin comes before cos."""
    uncalled: bool = False
    """Only another config's model calls it."""


class Rope(_Block):
    """A function that applies RoPE."""

    kind: Literal["rope"]
    parameters: RopeParameters


class MlpParameters(Parameters):
    """The form and the activation, by its name in transformers' table."""

    mlp: Literal["gated", "gated, fused", "plain"]
    activation: str


class Mlp(_Block):
    """A feed-forward network."""

    kind: Literal["mlp"]
    parameters: MlpParameters


class AttentionParameters(Parameters):
    """Of latent attention: the method that expands latents, the linear layer by which it does."""

    expand: Identifier | None = None
    kv_b_proj: Identifier | None = None


class Attention(_Block):
    """A class that calls the attention interface."""

    kind: Literal["attention"]
    parameters: AttentionParameters = Field(default_factory=AttentionParameters)


class ExpertsParameters(Parameters):
    """Where the weights of a mixture's experts are, how they are computed with, what their forward
    is given.
    """

    layout: Literal["modules", "stacks", "flat"]
    gate: AttributePath | None = None
    up: AttributePath | None = None
    experts: AttributePath | None = None
    gate_up: AttributePath | None = None
    down: AttributePath
    transposed: bool
    gate_up_bias: AttributePath | None = None
    down_bias: AttributePath | None = None
    form: Literal["whole", "halves", "swapped", "alternating"] | None = None
    down_stack: AttributePath | None = None
    down_transposed: bool = False
    limit: AttributePath | None = None
    alpha: AttributePath | None = None
    up_offset: float
    gate_cap: AttributePath | None = None
    up_cap: AttributePath | None = None
    act: AttributePath | None = None
    act_class: Identifier | None = None
    activation: Identifier
    gated: bool
    identity: bool = False
    x: Identifier
    indices: Identifier
    weights: Identifier


class Experts(_Block):
    """The experts of a mixture."""

    kind: Literal["experts"]
    parameters: ExpertsParameters


class MixtureParameters(Parameters):
    """The list of experts and the linear layers of each; the statements that are the mixture, by
    the method, the first one's number and how many; their variables.

    `biased`: the layers have biases; `in_rows`: `indices` has a token's experts in its last
    dimension.
    """

    experts: Identifier
    gate: Identifier
    down: Identifier
    up: Identifier | None = None
    biased: bool = False
    activation: Identifier
    method: Identifier
    begin: int
    count: int
    result: Identifier
    x: Identifier
    indices: Identifier
    weights: Identifier
    in_rows: bool
    router: AttributePath | None = None
    """The linear layer whose softmax chooses, where the statements choose the experts, too."""
    chosen: int = 0
    """How many it chooses then, and whether their weights are made to add up to one."""
    renormalised: bool = False


class Mixture(_Block):
    """A class whose experts are modules of a list, some statements of which are `torch_moe`."""

    kind: Literal["mixture"]
    parameters: MixtureParameters


class BlockIndexerParameters(Parameters):
    """The parts of an indexer, and what its forward is given."""

    proj: Identifier
    query_norm: Identifier
    key_norm: Identifier
    block_size: Identifier
    top_k: Identifier
    x: Identifier
    tables: Identifier


class BlockIndexer(_Block):
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


class Compressor(_Block):
    """What makes keys of blocks of tokens."""

    kind: Literal["compressor"]
    parameters: CompressorParameters


class PooledIndexerParameters(PoolParameters):
    """The layers that make queries and their weights."""

    query: AttributePath
    weights: AttributePath
    top_k: AttributePath


class PooledIndexer(_Block):
    """What chooses among keys of blocks."""

    kind: Literal["pooled_indexer"]
    parameters: PooledIndexerParameters


class ScanParameters(Parameters):
    """The canonical op."""

    op: Identifier


class Scan(_Block):
    """A function that is a canonical op of recurrent mixers."""

    kind: Literal["scan"]
    parameters: ScanParameters


class ScanModuleParameters(Parameters):
    """The canonical op, and the config's field that it reads."""

    op: Identifier
    eps: Identifier


class ScanModule(_Block):
    """A class without weights that is a canonical op."""

    kind: Literal["scan_module"]
    parameters: ScanModuleParameters


class LoopParameters(Parameters):
    """Which loop (or stretch, by its op) of which method, the op and its arguments; `turned`: in
    which of these, and of the result, channels or heads come before the sequence.

    `joined`: the dimension along which the list that the loop fills makes up the whole; `stacked`:
    its tensors lack it.
    """

    op: Identifier
    arguments: list[Variable]
    turned: list[Variable]
    result: Identifier
    joined: int | None
    stacked: bool = False
    method: Identifier
    index: int


class Loop(_Block):
    """A loop along the sequence, or a stretch of statements, that is a canonical op."""

    kind: Literal["loop"]
    parameters: LoopParameters


MaskKind = Literal["added", "window", "window+1", "seen", "hidden", "ones"]
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


class Mask(_Block):
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
