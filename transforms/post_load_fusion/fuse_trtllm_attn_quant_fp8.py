"""Attention that writes eight-bit floats for the linear layer behind it."""

from __future__ import annotations

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, is_op, nodes_of, only_user
from onboard.graph.new_nodes import infer_value
from onboard.graph.post_load_fusion.codes import earlier, is_eight_bit_linear, read_codes
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

aten = torch.ops.aten
_VIEWS = (aten.view, aten.reshape, aten.transpose, aten.permute, aten.contiguous, aten.clone)


@register_transform("fuse_trtllm_attn_quant_fp8")
class FuseTrtllmAttnQuantFP8(GraphTransform[TransformConfig]):
    """Let attention round its result to codes where all that reads it is a linear layer that has one
    scale for its input: on every back end here, the reference's among them.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each attention."""
        matches = 0
        for attention in nodes_of(gm, torch.ops.onboard.torch_attention):
            views, linear = _reader(attention)
            if linear is not None:
                _quantise(gm, attention, views, linear)
                matches += 1
        return matches


def _reader(attention: fx.Node) -> tuple[list[fx.Node], fx.Node | None]:
    """Return the views behind an attention, and the linear layer that alone reads the last of them,
    if it divides its input by one scale.
    """
    views, node = [], attention
    while (user := only_user(node)) is not None and is_op(user, *_VIEWS):
        views.append(user)
        node = user
    if user is None or not is_eight_bit_linear(user):
        return views, None
    values = arguments(user)
    return views, user if values["quantize"] == "tensor" and values["input"] is node else None


def _quantise(
    gm: fx.GraphModule, attention: fx.Node, views: list[fx.Node], linear: fx.Node
) -> None:
    scale, dtype = arguments(linear)["input_scale"], attention.meta["val"].dtype
    attention.update_kwarg("out_scale", earlier(attention, scale))
    for node in (attention, *views):
        infer_value(node)
    read_codes(gm, linear, views[-1] if views else attention, scale, dtype)
