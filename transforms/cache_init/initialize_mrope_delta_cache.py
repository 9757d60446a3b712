"""Keep on the device, for each running sequence, how far its images have moved the positions of
what follows.
"""

from __future__ import annotations

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.cache.cached_sequence import MROPE_DELTA
from onboard.cache.resources import StateResource
from onboard.graph.cache_init.interface import make_interface
from onboard.graph.context import TransformContext
from onboard.graph.fx import add_placeholder, placeholders
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
    skipped,
)


@register_transform("initialize_mrope_delta_cache")
class InitializeMropeDeltaCache(GraphTransform[TransformConfig]):
    """The graph adds to each token's position the number that its sequence has in a cache of slots.

    Without it the host adds that number to each position of each step, and tells the device all
    positions anew.
    """

    keeps_shapes = False

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int | TransformInfo:
        """Change the graph of a model whose prompts may have more than text; one match."""
        positions = next((node for node in placeholders(gm) if node.target == "position_ids"), None)
        if (
            positions is None
            or not context.factory.eager_modules
            or context.runtime.batch_invariant
        ):
            return skipped("the model has text alone, or the run is batch_invariant")
        if context.cache is None:
            context.cache = make_interface(context)
        resource = StateResource((1,), torch.int64, carries=False)
        context.cache.add_cache(MROPE_DELTA, resource)
        inputs = [
            add_placeholder(gm, name, context.cache.info.args[name])
            for name in ("cu_seqlens", "state_slots")
        ]
        inputs.append(add_placeholder(gm, MROPE_DELTA, resource.allocate(2, context.device)))
        with gm.graph.inserting_after(placeholders(gm)[-1]):
            moved = gm.graph.call_function(
                torch.ops.onboard.torch_shifted_positions.default, (positions, *inputs)
            )
        moved.meta["val"] = positions.meta["val"]
        positions.replace_all_uses_with(moved, delete_user_cb=lambda user: user is not moved)
        return 1
