"""The bytes that a decode step of one sequence reads at least, and how long a GPU's memory takes for
them: no step can be faster.

Weights are those of the checkpoint in the run's dtype, quantised ones as they are stored: of a
mixture's routed experts the share that a token goes to, of an embedding one row, unless it is the
head, too. Caches are those of the memory plan, at a given context.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from onboard.analysis.spec import LayerKind, ModelSpec
from onboard.analysis.spec_blocks import MIXTURES
from onboard.bench.work import ModelWork, Weights
from onboard.cache.resources import CacheResource

Shapes = Mapping[str, tuple[int, ...]]
"""Name -> shape of each tensor of a checkpoint."""
_NUMBER = re.compile(r"\d+(\.|$)")


@dataclass(frozen=True)
class ReadWeights:
    """Bytes of weights that a token reads, by the modules that have them."""

    spec: ModelSpec
    shapes: Shapes
    itemsize: int
    """Bytes of an element."""
    stored: Mapping[str, int] = field(default_factory=dict)
    """Bytes of quantised weights as they are stored: a run may compute with them so."""

    def of_layer(self, kind: LayerKind, layer: int, part: str = "") -> float:
        """Return the bytes of a layer, or of one of its parts, by its name in the layer."""
        base = layer_path(kind, layer)
        within = f"{base}.{part}." if part else f"{base}."
        return sum(
            self._bytes(name) * self._share(kind, name.removeprefix(f"{base}."))
            for name in self.shapes
            if name.startswith(within)
        )

    def outside_layers(self) -> dict[str, float]:
        """Return the bytes by tensor of what no layer has: head, norms; of embeddings a row."""
        paths = {kind.path.rpartition(".")[0] for kind in self.spec.layer_kinds}
        names = [
            name
            for name in self.shapes
            if not any(name.startswith(f"{path}.") for path in paths if path)
            and not any(name.startswith(f"{path}.") for path in self.spec.eager)
        ]
        rows = self._looked_up(names)
        return {
            name: self._bytes(name) / (self.shapes[name][0] if name in rows else 1)
            for name in names
        }

    def _looked_up(self, names: list[str]) -> set[str]:
        """Return the tables of which a token reads a row: all with a row a token, but the head."""
        vocabulary = self.spec.config.get("vocab_size")
        tables = [
            name
            for name in names
            if len(self.shapes[name]) == 2 and self.shapes[name][0] == vocabulary
        ]
        # A head has the size of the hidden state, and is one of two alike, or the embedding itself
        head = tables[-1:] if tables else []
        return {name for name in tables if name not in head}

    def _bytes(self, name: str) -> int:
        return self.stored.get(name, math.prod(self.shapes[name]) * self.itemsize)

    def _share(self, kind: LayerKind, name: str) -> float:
        """Return the share of a layer's weight that a token reads: of routed experts those that it
        goes to.
        """
        kinds = {block.class_name: block.kind for block in self.spec.blocks}
        for part, class_name in kind.modules.items():
            if kinds.get(class_name) not in MIXTURES or not name.startswith(f"{part}."):
                continue
            rest = name.removeprefix(f"{part}.")
            if kinds[class_name] == "experts" or _NUMBER.search(rest):
                return self._chosen()
        return 1.0

    def _chosen(self) -> float:
        traits = self.spec.traits
        counts = [traits[name].value if name in traits else None for name in _EXPERTS]
        chosen, count = (value if isinstance(value, int) else 0 for value in counts)
        return chosen / count if chosen and count else 1.0


_EXPERTS = ("experts_per_token", "experts")


def layer_path(kind: LayerKind, layer: int) -> str:
    """Return the module path of a layer of the checkpoint."""
    return f"{kind.path.rpartition('.')[0]}.{layer}"


def cache_bytes(resources: tuple[CacheResource, ...], context: int) -> float:
    """Return what a decode step reads of the caches of a sequence of `context` tokens."""
    return ModelWork(Weights(), resources, 1).cache_bytes(context)
