"""Latent attention that rotates its queries and keys itself."""

from __future__ import annotations

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, nodes_of, replace_with
from onboard.graph.new_nodes import insert_call
from onboard.graph.post_load_fusion.rotated_attention import rotation_before
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform

_ops = torch.ops.onboard


@register_transform("fuse_rope_into_trtllm_mla")
class FuseRopeIntoTrtllmMLA(GraphTransform[TransformConfig]):
    """Let latent attention read what has positions from before its rotation: on every back end
    here, the reference's among them.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Count one match for each attention."""
        attentions, matches = nodes_of(gm, _ops.torch_mla), 0
        for attention in attentions:
            matches += _fuse(gm, attention)
        if 0 < matches < len(attentions):
            left = len(attentions) - matches
            context.facts.append(f"{self.key}: {left} attentions do not rotate themselves")
        return matches


def _fuse(gm: fx.GraphModule, attention: fx.Node) -> bool:
    """Replace a causal attention behind a rotation of its own; return whether it was one."""
    values, op = arguments(attention), _ops.torch_rope_mla.default
    found = rotation_before(attention, values["q_pe"], values["kpe"])
    if found is None or not values["is_causal"]:
        return False
    cos, sin, turns = found.tables(gm)
    values |= {"q_pe": found.query, "kpe": found.key, "cos": cos, "sin": sin, "turns": turns}
    args = [values[each.name] for each in op._schema.arguments]
    replace_with(attention, insert_call(gm, attention, op, *args, like=attention))
    return True
