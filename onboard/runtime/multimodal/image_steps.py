"""Steps that read images or sound: the graph that takes their embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx, nn

from onboard.cache.cached_sequence import CachedSequenceInterface
from onboard.graph.cache_init.embedded_inputs import with_image_inputs
from onboard.graph.fx import graph_modules
from onboard.runtime.multimodal.image_inputs import image_rows
from onboard.runtime.scheduling.request import Step

if TYPE_CHECKING:
    from onboard.runtime.multimodal.own_towers import OwnTowers
    from onboard.runtime.multimodal.towers import Towers


class ImageSteps:
    """Makes the graphs of steps that prefill prompts with images; their embeddings come from the
    towers.
    """

    def __init__(
        self, gm: nn.Module, cache: CachedSequenceInterface, towers: Towers | OwnTowers | None
    ) -> None:
        self._gm, self._cache, self._towers = gm, cache, towers
        self._graphs: dict[tuple[bool, bool, tuple[str, ...]], fx.GraphModule] = {}

    def graph(self, step: Step) -> fx.GraphModule:
        """Return the graph that runs a step whose numbers are written, and add its image inputs to
        these.
        """
        parts = [chunk.sequence.image_inputs for chunk in step.chunks if chunk.reads_images()]
        rope = any(part.tables is not None for part in parts if part is not None)
        blocks = any(part.blocks is not None for part in parts if part is not None)
        assert self._towers is not None
        added = tuple(sorted({layer for part in parts if part is not None for layer in part.added}))
        if (key := (rope, blocks, added)) not in self._graphs:
            (_, graph), *_ = graph_modules(self._gm)
            self._graphs[key] = with_image_inputs(
                graph, self._towers.embedding, rope=rope, blocks=blocks, added=added
            )
        info = self._cache.info
        rows = image_rows(step, info.inputs["input_ids"].shape[1], info.device)
        info.inputs = {**info.inputs, **rows}
        return self._graphs[key]
