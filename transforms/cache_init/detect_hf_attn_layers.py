"""Find the attention layers of transformers' eager model: what they are called with, and whether
ours is the same.
"""

from __future__ import annotations

import torch
from torch import nn

from onboard.errors import OnboardError
from onboard.graph.cache_init.attention_probe import check_calls
from onboard.graph.cache_init.cached_hf import AttentionLayer
from onboard.graph.context import TransformContext
from onboard.graph.export.hf_attention import AttentionCall, attention_recorded
from onboard.graph.export.hf_export import canonical_attention
from onboard.graph.transform import (
    BaseTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)


@register_transform("detect_hf_attn_layers")
class DetectHFAttnLayers(BaseTransform[TransformConfig]):
    """Run one forward pass and note every call of transformers' attention interface, in order."""

    @torch.no_grad()
    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Leave the layers in `context.attention`; raise `OnboardError` for attention that cannot
        be replaced.
        """
        calls: list[AttentionCall] = []

        def attend(call: AttentionCall) -> torch.Tensor:
            calls.append(call)
            return canonical_attention(call)

        inputs = {
            name: value.to(context.device)
            for name, value in context.factory.example_inputs().items()
        }
        inputs["input_ids"] %= context.factory.config.get_text_config().vocab_size
        with attention_recorded(gm, attend, context.runtime.max_seq_len):
            gm(**inputs, use_cache=False)
        if not calls:
            raise OnboardError(
                f"the attention of {type(gm).__name__} does not go through transformers' interface",
                hint="Onboard the model, or try --mode hf, which matches attention that is written out",
            )
        check_calls(gm, calls)
        paths = {module: path for path, module in gm.named_modules()}
        context.attention = [AttentionLayer.of(call, paths[call.module]) for call in calls]
        return gm, TransformInfo(num_matches=len(calls), is_clean=True, has_valid_shapes=True)
