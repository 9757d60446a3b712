"""The configuration of a run: what a registry entry, a standalone YAML file and `LLM` all validate
against.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from onboard.errors import UsageError
from onboard.untrusted.bounds import (
    ADAPTERS,
    BATCH,
    CAPTURES,
    DEVICES,
    DRAFTS,
    PAGE,
    SEQUENCE,
    STEP,
    TOKENS,
)

_OURS = "Value error, "  # what pydantic puts before words of ours
DType = Literal["auto", "float32", "float16", "bfloat16"]
ADAPTER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/:@-]{0,127}$"
CacheDType = Literal["auto", "float32", "float16", "bfloat16", "float8_e4m3fn"]
StateDType = Literal["auto", "float32", "float16", "bfloat16"]
Mode = Literal["graph", "hf", "transformers"]
"""Which road a model takes: its generated file, exported; transformers' module, exported; or that
module as it is.
"""


class StrictModel(BaseModel):
    """A pydantic model that refuses unknown keys and names the nearest valid one."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            for key in values:
                if key not in cls.model_fields:
                    raise UsageError(
                        f"{cls.__name__} has no field {key!r}", hint=suggest(key, cls.model_fields)
                    )
        return values


class ModelOfOptions(StrictModel):
    """One whose values a caller gives as options: `UsageError` names the first that is wrong."""

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_in_one_line(cls, values: Any, validate: Callable[[Any], Self]) -> Self:
        try:
            return validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            place, reason = ".".join(map(str, first["loc"])), first["msg"].removeprefix(_OURS)
            found = f"{place} is {first['input']!r:.80}: " if place else ""
            raise UsageError(f"{found}{reason}") from None


_LISTED, _NEAR = 20, 3
"""Most names that a hint lists where they are listed elsewhere, too; most of those with a word in them."""


def suggest(name: str, known: Any, where: str = "") -> str:
    """Return a hint that names the valid spelling nearest to `name`, or those that have it in them,
    or all of them; of many only how many there are, and `where` they are listed.
    """
    names, word = sorted(map(str, known)), str(name).lower()
    near = difflib.get_close_matches(str(name), names, n=1)
    near = near or [each for each in names if len(word) > 2 and word in each.lower()]
    if 0 < len(near) <= _NEAR:
        return f"Did you mean {' or '.join(map(repr, near))}?"
    if not where or len(names) <= _LISTED:
        return f"Valid: {', '.join(names)}"
    found = f", {len(near)} with that in their names" if near else ""
    return f"There are {len(names)}{found}: see {where}"


class KVCacheConfig(StrictModel):
    """The paged key-value cache."""

    free_gpu_memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """Share of the memory that is free after a full-size forward pass which the cache may take."""
    max_tokens: int | None = Field(default=None, ge=1, le=TOKENS.most)
    """Upper bound on cached tokens over all sequences; None: as many as fit."""
    tokens_per_block: int = Field(default=32, ge=1, le=PAGE.most)
    """Page size, in tokens."""
    dtype: CacheDType = "auto"
    """Of keys and values; auto: that of the run, or float8_e4m3fn in 16-bit runs on a GPU if the
    checkpoint asks for it. It halves what bfloat16 takes, rounds to 4 bits, and has the checkpoint's
    scales.
    """
    mamba_ssm_cache_dtype: StateDType = "auto"
    """Of Mamba 2's states; auto: that of the recurrence, float32, which transformers' states have,
    too. 16 bits halve what a step reads and writes of them and round each state once a step: small
    inputs of states that last are lost.
    """
    enable_block_reuse: bool = True
    """Keep what requests leave in the cache, as long as there is room, for requests that begin with
    the same tokens.
    """
    state_snapshots: int | None = Field(default=None, ge=0, le=BATCH.most)
    """Recurrent states that are kept for that; None: as many as `max_batch_size`."""


class CudaGraphConfig(StrictModel):
    """Which batch sizes are captured as CUDA graphs."""

    batch_sizes: list[Annotated[int, Field(ge=1, le=BATCH.most)]] | None = Field(
        default=None, max_length=CAPTURES.most
    )
    """None: powers of two up to `max_batch_size`, 24 and 48, from 64 on multiples of 16, from 256 on
    seven sizes between two powers."""
    enable_padding: bool = True
    """Round a decode batch up to the next captured size."""


class DistMapping(StrictModel):
    """How the ranks divide the work: sizes of groups of ranks. None: what the others leave."""

    tp: int | None = Field(default=None, ge=1, le=DEVICES.most)
    """Ranks that divide a layer's heads and channels."""
    moe_tp: int | None = Field(default=None, ge=1, le=DEVICES.most)
    """Ranks that divide each expert of a mixture."""
    moe_ep: int | None = Field(default=None, ge=1, le=DEVICES.most)
    """Groups of ranks that divide the experts among them."""
    pp: int = Field(default=1, ge=1, le=DEVICES.most)
    """Pipeline stages, each of a rank: ranks have whole layers then, and follow one another."""


OWN_HEADS = "mtp"
"""Who drafts: the checkpoint's own heads."""


class SpeculativeConfig(StrictModel):
    """Drafts of the next tokens, which one step checks together; tokens are the same without."""

    draft: str = ""
    """Who drafts: `ngram` finds the last tokens earlier in the text, `mtp` are the checkpoint's own
    heads for multi-token prediction, else it is the folder or id of an onboarded model with the same
    vocabulary; empty: nobody.
    """
    num_tokens: int = Field(default=4, ge=1, le=DRAFTS.most)
    """Most tokens of a draft."""


class RuntimeConfig(StrictModel):
    """Everything that a run of one model needs besides the checkpoint; the content of a standalone
    YAML file.
    """

    model: str = ""
    revision: str | None = None
    mode: Mode = "graph"
    """graph: the generated file, exported; hf: transformers' own model, exported; transformers:
    that model, eager.
    """
    tokenizer: str = ""
    """Folder or id of another tokenizer than the checkpoint's."""
    dtype: DType = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    world_size: int = Field(default=1, ge=1, le=DEVICES.most)
    """Ranks, each with a device and its share of the weights."""
    dist_mapping: DistMapping = Field(default_factory=DistMapping)
    max_seq_len: int | None = Field(default=None, ge=1, le=SEQUENCE.most)
    """Most tokens of a sequence, prompt included; None: as many as the model reads and the caches
    have room for.
    """
    max_batch_size: int | None = Field(default=None, ge=1, le=BATCH.most)
    """Most sequences at a time; None: 8 on the CPU, on a GPU 256, or what its memory holds."""
    max_num_tokens: int | None = Field(default=None, ge=1, le=STEP.most)
    """Most tokens in one forward pass, longer prompts are prefilled in chunks; None: 2048 on the
    CPU, 8192 on a GPU.
    """
    attn_backend: Literal["auto", "torch", "triton"] = "auto"
    """auto: triton on a GPU, torch elsewhere."""
    compile_backend: Literal[
        "auto", "torch-simple", "torch-compile", "torch-cudagraph", "torch-opt", "torch-tensorrt"
    ] = "auto"
    """auto: torch-cudagraph on a GPU, torch-simple elsewhere; torch-tensorrt: torch.compile with
    that package, which is not installed with this one.
    """
    batch_invariant: bool = False
    """A sequence's logits are the same, bit for bit, whatever else is in the batch; slower, and not
    for every model.
    """
    overlap: bool | None = None
    """Prepare and start a step while the one before is computed; None: on a GPU."""
    kv_cache_config: KVCacheConfig = Field(default_factory=KVCacheConfig)
    cuda_graph_config: CudaGraphConfig = Field(default_factory=CudaGraphConfig)
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Overrides of the Hugging Face config (for example `num_hidden_layers: 2` for a reduced
    run).
    """
    speculative: SpeculativeConfig = Field(default_factory=SpeculativeConfig)
    quantize: Literal["none", "fp8", "fp8-block", "int4", "mxfp4"] = "none"
    """Linear layers of an unquantised checkpoint in fewer bits, by its weights alone: in
    float8_e4m3fn with scales of rows or of blocks of 128 x 128, and inputs quantised as they come; in
    four bits with scales of groups of 128 inputs (int4) or 32 (mxfp4). The head stays as it is.
    """
    lora: dict[Annotated[str, Field(pattern=ADAPTER_NAME)], str] = Field(
        default_factory=dict, max_length=ADAPTERS.most
    )
    """Low-rank adapters that requests may name, each with its folder in PEFT's format."""
    skip_loading_weights: bool = False
    """Random weights instead of the checkpoint's."""
    transforms: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Overrides of the pipeline, by transform key."""


class SettledConfig(RuntimeConfig):
    """The configuration of a run whose limits are numbers, whoever chose them."""

    max_seq_len: int = Field(ge=1, le=SEQUENCE.most)
    max_batch_size: int = Field(ge=1, le=BATCH.most)
    max_num_tokens: int = Field(ge=1, le=STEP.most)


def with_settings(config: RuntimeConfig, settings: Mapping[str, Any] | None) -> RuntimeConfig:
    """Return a configuration in which `settings`, nested as it is, replace single fields; raise
    `UsageError`.
    """
    if not settings:
        return config
    try:
        return RuntimeConfig.model_validate(
            deep_merge(config.model_dump(exclude_unset=True), settings)
        )
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        raise UsageError(f"{path} is {first['input']!r:.100}: {first['msg']}") from None


def deep_merge(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated by `override`: mappings merge key by key, everything else is
    replaced.
    """
    merged = dict(base)
    for key, value in override.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = deep_merge(old, value) if both else value  # type: ignore[arg-type]
    return merged
