"""What the analysis says of a model, in the terms that the translation needs: by the names of
classes and functions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onboard.analysis.blocks.spec_mixtures import MixtureParameters
from onboard.analysis.spec_blocks import (
    AttentionParameters,
    LoopParameters,
    RopeParameters,
    ScanModuleParameters,
    ScanParameters,
)

NORMS = ("rmsnorm", "layernorm", "l2norm")


@dataclass(frozen=True)
class Recognised:
    """How a class is generated: the kind of its block and the parameters of the kind's template."""

    kind: str
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def own_init(self) -> bool:
        """Whether the template writes `__init__`, too."""
        return self.kind == "rotary"

    @property
    def last_dimension_only(self) -> bool:
        """Whether the block treats all dimensions but the last alike, so that swapping these does
        not matter.
        """
        return self.kind in NORMS and not self.parameters.get("per_head")


@dataclass(frozen=True)
class Findings:
    """What is known of a model's classes and functions before they are translated."""

    recognised: Mapping[str, Recognised] = field(default_factory=dict)
    """Class -> how its block is generated from a template."""
    ropes: Mapping[str, str] = field(default_factory=dict)
    """Function -> the canonical op that applies RoPE as it does."""
    rope_dims: Mapping[str, int] = field(default_factory=dict)
    """Function -> where it gives complex numbers the dimension of heads."""
    rope_tables: Mapping[str, int] = field(default_factory=dict)
    """Function that applies RoPE and takes its tables whole -> the tables' dimensions."""
    half_ropes: Collection[str] = ()
    """Functions that apply RoPE whose tables have each frequency once."""
    rope_frequencies: Mapping[str, str] = field(default_factory=dict)
    """Function that turns neighbouring channels -> where its tables have the two of a frequency."""
    rope_flags: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)
    """Function that applies RoPE -> the truth values behind the tensors with which it does."""
    single_ropes: Mapping[str, RopeParameters] = field(default_factory=dict)
    """Function that applies RoPE to one tensor -> the op that does so to two, and how."""
    scans: Mapping[str, ScanParameters] = field(default_factory=dict)
    """Function -> the canonical op of a recurrent mixer that it is, and how it is called."""
    scan_modules: Mapping[str, ScanModuleParameters] = field(default_factory=dict)
    """Class -> the canonical op that its modules, which have no weights, are."""
    loops: Mapping[str, Sequence[LoopParameters]] = field(default_factory=dict)
    """Class or function -> the loops in its methods, or in it, that are canonical ops."""
    mixtures: Mapping[str, MixtureParameters] = field(default_factory=dict)
    """Class -> the statements of its methods that send tokens to experts."""
    latents: Mapping[str, AttentionParameters] = field(default_factory=dict)
    """Class of latent attention -> the names of its parts."""
    masks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Function or method that makes causal masks -> the kinds of those that it returns."""
    eager: Collection[str] = ()
    """Paths of a multimodal model's towers, which the generated model leaves out."""
    alibi: bool = False
    """Attention has a bias that is linear in the key's position."""
