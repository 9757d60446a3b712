"""Replace scaled_dot_product_attention by the canonical attention op."""

from __future__ import annotations

import torch
from torch import fx, nn

from onboard.graph.attention import MaskReader, insert_attention, is_within_tokens
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, nodes_of, replace_with
from onboard.graph.patterns import rank
from onboard.graph.transform import BaseTransform, TransformConfig, TransformInfo, register_transform


@register_transform("match_sdpa_to_torch_attention")
class MatchSDPAToTorchAttention(BaseTransform[TransformConfig]):
    """Replace PyTorch's and the canonical sdpa op by `torch_attention` in layout bnsd.

    A mask that is computed in the graph and turns out to be causal or a sliding window is dropped for the arguments
    that say so.
    """

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Replace each call on four-dimensional tensors."""
        assert isinstance(gm, fx.GraphModule)
        masks = MaskReader(gm)
        calls = nodes_of(gm, torch.ops.aten.scaled_dot_product_attention, torch.ops.onboard.torch_attention_sdpa)
        matched = [node for node in calls if rank(node) == 4 and not is_within_tokens(node)]
        for node in matched:
            named = arguments(node)
            inputs = (named["query"], named["key"], named["value"])
            options = masks.read(named["attn_mask"], is_causal=named["is_causal"])
            new = insert_attention(
                gm, node, inputs, **options, dropout_p=named["dropout_p"], scale=named["scale"], layout="bnsd"
            )
            replace_with(node, new)
        return gm, TransformInfo(num_matches=len(matched), is_clean=not matched, has_valid_shapes=True)
