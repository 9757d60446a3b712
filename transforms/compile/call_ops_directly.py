"""Past the dispatcher on the CPU, where it takes as long as a small operator."""

from __future__ import annotations

from torch import fx, nn

from onboard.graph.compile.direct_calls import DirectCalls
from onboard.graph.context import TransformContext
from onboard.graph.transform import (
    BaseTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
    skipped,
)


@register_transform("call_ops_directly")
class CallOpsDirectly(BaseTransform[TransformConfig]):
    """Let a graph that nothing compiled call the functions behind our operators; on a GPU CUDA
    graphs do better.
    """

    acts = True

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Count one match a call."""
        if context.device.type != "cpu" or not isinstance(gm, fx.GraphModule):
            return gm, skipped("it is for graphs on a CPU")
        direct = DirectCalls(gm)
        return direct, TransformInfo(
            num_matches=direct.num_calls, is_clean=True, has_valid_shapes=True
        )
