"""What a kind of layer looks like in the report: its parts in the order in which they run, and a
mixture's experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onboard.analysis.spec import LayerKind, ModelSpec
from onboard.analysis.spec_blocks import MIXTURES, Attention, Block

_DRAWN = 256
"""Most experts that are drawn."""
_LATENT = "kv_b_proj"
"""What the probe of latent attention (MLA) says of a block."""


@dataclass
class Experts:
    """The routed experts of a mixture: how many there are, a token goes to, and every token goes
    to.
    """

    count: int
    chosen: int
    shared: int

    @property
    def drawn(self) -> int:
        """How many squares there are in the picture."""
        return min(self.count, _DRAWN)

    def __str__(self) -> str:
        shared = f", and {self.shared} shared" if self.shared else ""
        return f"{self.chosen} of {self.count} experts a token{shared}"


@dataclass
class Part:
    """A part of a layer: `title` is its name in the module tree, `what` the usual word for it."""

    title: str
    what: str
    kind: str
    details: list[str] = field(default_factory=list)
    experts: Experts | None = None
    inner: list[str] = field(default_factory=list)
    """Names of blocks inside it."""

    def __str__(self) -> str:
        about = "; ".join(
            [self.what, *self.details, *([str(self.experts)] if self.experts else [])]
        )
        return f"{self.title} ({about})"


def layer_parts(spec: ModelSpec, kind: LayerKind, config: Mapping[str, Any]) -> list[Part]:
    """Return the parts of a kind of layer; `config` has the checkpoint's values under their usual
    names.
    """
    blocks = {block.class_name: block for block in spec.blocks}
    inside = {name: blocks[cls] for name, cls in kind.modules.items() if cls in blocks}
    outer = [name for name in inside if not any(name.startswith(f"{other}.") for other in inside)]
    return [_part(spec, kind, config, name, inside) for name in outer]


def _part(
    spec: ModelSpec,
    kind: LayerKind,
    config: Mapping[str, Any],
    name: str,
    inside: Mapping[str, Block],
) -> Part:
    under = {
        path.removeprefix(f"{name}."): block
        for path, block in inside.items()
        if path.startswith(f"{name}.")
    }
    part = Part(
        name, inside[name].kind.replace("_", " "), inside[name].kind, inner=_once(list(under))
    )
    if any(block.kind in MIXTURES for block in (inside[name], *under.values())):
        part.what, part.kind, part.experts = "mixture of experts", "experts", _experts(spec)
    elif part.kind == "attention":
        part.what, part.details = _attention(spec, kind, config, inside[name])
    elif part.kind == "mlp":
        part.details = _sizes({"intermediate_size": "{} wide"}, config)
    return part


def _attention(
    spec: ModelSpec, kind: LayerKind, config: Mapping[str, Any], block: Block
) -> tuple[str, list[str]]:
    """Return the kind of attention, as people say it, and its figures as far as the config has one
    for all layers.
    """
    details = _sizes({"num_attention_heads": "{} heads"}, config)
    if isinstance(block, Attention) and block.parameters.expand is not None:
        names = {
            "q_lora_rank": "queries from a latent of {}",
            "kv_lora_rank": "keys and values from a latent of {}",
        }
        return "MLA", [
            *details,
            *_sizes(names | {"qk_rope_head_dim": "{} channels with RoPE beside it"}, config),
        ]
    if kind.name.startswith("sliding"):
        details += _sizes({"sliding_window": "window {}"}, config)
    value = spec.traits["attention"].value if "attention" in spec.traits else "attention"
    return str(value).upper(), [
        *details,
        *_sizes({"num_key_value_heads": "{} of keys and values"}, config),
    ]


def _sizes(texts: Mapping[str, str], config: Mapping[str, Any]) -> list[str]:
    found = ((text, config.get(name)) for name, text in texts.items())
    return [text.format(f"{value:,}") for text, value in found if type(value) is int]


def _experts(spec: ModelSpec) -> Experts | None:
    names = ("experts", "experts_per_token", "shared_experts")
    values = [spec.traits[name].value if name in spec.traits else 0 for name in names]
    count, chosen, shared = (value if isinstance(value, int) else 0 for value in values)
    return Experts(count, chosen, shared) if count and chosen else None


def _once(names: list[str]) -> list[str]:
    """Return names, of those that differ in a number alone the first: an expert's of a list of
    them.
    """
    return list({re.sub(r"\d+", "*", name): name for name in reversed(names)}.values())[::-1]
