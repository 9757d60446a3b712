"""Which layers a small model keeps: one of each kind, however the config tells them apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onboard.analysis.tiny.tiny_mixers import attends_in_blocks
from onboard.hf.config_layers import Layers

_MOST_LAYERS = 8


def kinds(layers: Layers) -> list[str]:
    """Return what tells each layer from others."""
    return [_kind(layers, index) for index in range(layers.count)]


def first_of_each_kind(layers: Layers, values: Mapping[str, Any]) -> list[int]:
    """Return the layers to keep: the first of each kind, at least two.

    Blocks of hybrid layers may be shared by all such layers, in turn where there are several: one
    more is kept. Where linear attention forgets less the deeper it lies, the last layer forgets
    nothing: two of each kind are kept.
    """
    seen: dict[str, list[int]] = {}
    for index, kind in enumerate(kinds(layers)):
        seen.setdefault(kind, []).append(index)
    shared, others = 1 + values.get("num_mem_blocks", 1), 2 if attends_in_blocks(values) else 1
    kept = sorted(
        i
        for kind, of_kind in seen.items()
        for i in of_kind[: shared if "'hybrid'" in kind else others]
    )
    return kept if len(kept) > 1 else prefix(layers)


def prefix(layers: Layers, shortest: int = 2) -> list[int]:
    """Return layers from the first on, until a period is over."""
    return list(
        range(min(layers.count, max(shortest, *layers.periods, 2), max(shortest, _MOST_LAYERS)))
    )


def _kind(layers: Layers, index: int) -> str:
    listed = [value[index] for value in (*layers.lists.values(), *layers.views.values())]
    named = [index in indices for indices in layers.indices.values()]
    firsts = [index < count for count in layers.firsts.values()]
    lasts = [index >= layers.count - count for count in layers.lasts.values()]
    return repr([listed, named, firsts, lasts, layers.overrides.get(index)])
