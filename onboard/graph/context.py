"""What transforms share while a pipeline runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onboard.cache.budget import TowerMemory, lowered
from onboard.config import SettledConfig
from onboard.modeling import ONE_CODEBOOK, Codebooks
from onboard.parallel.ranks import ALONE, Ranks
from onboard.untrusted.consent import NO_CONSENT, Consent

if TYPE_CHECKING:
    from onboard.cache.resources import CacheResource
    from onboard.graph.cache_init.cached_hf import AttentionLayer
    from onboard.graph.draft_heads.add_heads import HeadGraph
    from onboard.graph.export.layer_kinds import Repeated
    from onboard.graph.factory import ModelFactory


@dataclass(frozen=True)
class HistoryEntry:
    """What one transform did in a run of the pipeline."""

    key: str
    stage: str
    enabled: bool
    skipped: bool
    num_matches: int
    seconds: float
    is_clean: bool
    has_valid_shapes: bool
    memory_delta: int
    """Bytes: allocated CUDA memory on a GPU, resident memory of the process elsewhere."""
    error: str | None = None
    from_cache: bool = False
    """It was done in an earlier start: the graph was taken from the cache."""
    summary: str = ""
    """What was done beyond the matches, or why it was skipped."""
    nodes: tuple[int, int] | None = None
    """Nodes of all graphs before and after it; None where there was none, or it is not enabled."""
    ops: dict[str, int] = field(default_factory=dict)
    """Operators of which there are more after it, or fewer (below zero), and how many."""


@dataclass
class TransformContext:
    """The run that a pipeline serves; transforms leave here what later stages and the runtime
    need.
    """

    factory: ModelFactory
    runtime: SettledConfig
    device: torch.device
    dtype: torch.dtype
    chosen: frozenset[str] = frozenset()
    """Limits of `runtime` that nobody asked for: what is known of graph and memory may lower
    them.
    """
    ranks: Ranks = ALONE
    """This process among those that run the model together."""
    first_position: int = 0
    """The position of a text's first token."""
    longest: int | None = None
    """The largest `max_seq_len` for which the exported graph is right; None: that of the run, as
    far as is known.
    """
    codebooks: Codebooks = ONE_CODEBOOK
    """What a token stands for."""
    consent: Consent = NO_CONSENT
    """What the user has agreed to have run."""
    facts: list[str] = field(default_factory=list)
    """Visible facts: fallbacks, skipped matches, unused graphs. The report and the log show
    each.
    """
    history: list[HistoryEntry] = field(default_factory=list)
    """One entry a transform, in order; `dataclasses.asdict` of each is JSON."""
    cache: Any = None
    """The `CachedSequenceInterface` (onboard.cache.cached_sequence): made by the first
    `insert_cached_*`, allocated by `initialize_cache`, grown by `resize_kv_cache`."""

    whole_caches: tuple[CacheResource, ...] = ()
    """Of the whole model, where this rank has a pipeline stage of it."""
    bytes_read: int = 0
    """Of the checkpoint's files, for the weights."""
    towers: TowerMemory = TowerMemory()
    """What caches leave free for towers, which take it when the first image or sound comes."""
    left_out: Repeated | None = None
    """What the graph has too few of, since only its size is wanted: `export_to_gm` left it out."""

    shared: dict[str, nn.Parameter] = field(default_factory=dict)
    """Parameters that another graph has loaded, by their names there: this one has them, too, and
    the checkpoint has more than this graph reads."""
    draft_heads: list[HeadGraph] = field(default_factory=list)
    """The checkpoint's heads that predict further tokens: found by `add_draft_heads`."""

    attention: list[AttentionLayer] = field(default_factory=list)
    """Attention calls of transformers' eager model, in order: found by `detect_hf_attn_layers`."""

    on_transformers_model: Callable[[nn.Module], None] | None = None
    """Called with transformers' own model on the CPU, once it has its weights and before they are
    taken from it.
    """

    def lower(self, limit: str, value: int, why: str) -> None:
        """Lower a limit that nobody asked for; that is a fact."""
        assert limit in self.chosen
        self.facts.append(lowered(limit, getattr(self.runtime, limit), value, why))
        self.runtime = self.runtime.model_copy(update={limit: value})

    @property
    def attn_backend(self) -> str:
        """The attention back end that "auto" stands for on this device."""
        if self.runtime.attn_backend != "auto":
            return self.runtime.attn_backend
        return "triton" if self.device.type == "cuda" else "torch"
