"""Replace scaled_dot_product_attention by the canonical attention op."""

from __future__ import annotations

import torch
from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, call, nodes_of, replace_with
from onboard.graph.pattern_matcher.attention_nodes import MaskReader, insert_attention
from onboard.graph.pattern_matcher.patterns import aten, rank
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)


@register_transform("match_sdpa_to_torch_attention")
class MatchSDPAToTorchAttention(GraphTransform[TransformConfig]):
    """Replace PyTorch's and the canonical sdpa op by `torch_attention` in layout bnsd.

    A mask that is computed in the graph and turns out to be causal or a sliding window is dropped
    for the arguments that say so. What is within each token, [batch, tokens, count, dim], is none
    of that: it is written out.
    """

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> TransformInfo:
        """Replace each call on four-dimensional tensors."""
        masks = MaskReader(gm)
        calls = nodes_of(
            gm, torch.ops.aten.scaled_dot_product_attention, torch.ops.onboard.torch_attention_sdpa
        )
        within = [node for node in calls if rank(node) == 4 and _is_within_tokens(node)]
        for node in within:
            replace_with(node, _written_out(gm, node))
        matched = [node for node in calls if rank(node) == 4 and node not in within]
        for node in matched:
            named = arguments(node)
            inputs = (named["query"], named["key"], named["value"])
            options = masks.read(named["attn_mask"], is_causal=named["is_causal"])
            new = insert_attention(
                gm,
                node,
                inputs,
                **options,
                dropout_p=named["dropout_p"],
                scale=named["scale"],
                layout="bnsd",
            )
            replace_with(node, new)
        changed = bool(matched or within)
        return TransformInfo(
            num_matches=len(matched), is_clean=not changed, has_valid_shapes=not within
        )


def _is_within_tokens(node: fx.Node) -> bool:
    """Whether queries and keys [batch, tokens, count, dim] are of one token each, which sees no
    other.
    """
    named = arguments(node)
    sizes = [named[name].meta["val"].shape for name in ("query", "key")]
    tokens = all(isinstance(size[1], torch.SymInt) and isinstance(size[2], int) for size in sizes)
    return (
        tokens
        and named["attn_mask"] is None
        and not named["is_causal"]
        and named["dropout_p"] == 0.0
    )


def _written_out(gm: fx.GraphModule, node: fx.Node) -> fx.Node:
    """Return softmax(q k^T * scale) v, whose last product is a sum: it is no attention to
    tokens.
    """
    named = arguments(node)
    query, key, value = (named[name] for name in ("query", "key", "value"))
    scale = named["scale"] or int(query.meta["val"].shape[-1]) ** -0.5
    turned = call(gm, node, aten.transpose.int, key, -1, -2, like=node)
    scores = call(gm, node, aten.matmul.default, query, turned, like=node)
    scores = call(gm, node, aten.mul.Tensor, scores, scale, like=node)
    weights = call(gm, node, aten.softmax.int, scores, -1, like=node)
    weights = call(gm, node, aten.unsqueeze.default, weights, -1, like=node)
    values = call(gm, node, aten.unsqueeze.default, value, -3, like=node)
    weighted = call(gm, node, aten.mul.Tensor, weights, values, like=node)
    return call(gm, node, aten.sum.dim_IntList, weighted, [-2], like=node)
