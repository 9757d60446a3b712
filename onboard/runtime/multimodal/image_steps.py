"""Steps that read images or sound: the graph that takes their embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from onboard.cache.cached_sequence import CachedSequenceInterface
from onboard.errors import UsageError
from onboard.graph.cache_init.embedded_inputs import with_image_inputs
from onboard.graph.fx import graph_modules
from onboard.runtime.multimodal.image_inputs import ImageInputs, image_rows
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

    def prepare(self, prompt: list[int], inputs: Mapping[str, Any]) -> ImageInputs:
        """Return the image inputs of a prompt, from the output of transformers' processor.

        Raises `UsageError` for a model that takes text alone, and an image that no step has room for.
        """
        if self._towers is None:
            raise UsageError(
                "a prompt has more than text and the model takes text alone",
                hint="Leave the images out",
            )
        images = self._towers.prepare(prompt, inputs)
        most = self._cache.info.max_num_tokens
        if images.longest_block() > most:
            raise UsageError(
                f"an image has {images.longest_block()} tokens, which have to come in one step",
                hint=f"Raise max_num_tokens ({most})",
            )
        return images

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
