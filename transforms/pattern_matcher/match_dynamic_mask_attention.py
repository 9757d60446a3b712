"""Find attention whose mask keeps the keys of the largest bias, each key having one of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from onboard.graph.context import TransformContext
from onboard.graph.fx import ancestors, arguments, call, is_op, nodes_of, replace_with
from onboard.graph.pattern_matcher.attention_nodes import ATTENTION
from onboard.graph.pattern_matcher.masks import PROBED, evaluate
from onboard.graph.pattern_matcher.patterns import aten
from onboard.graph.transform import GraphTransform, TransformConfig, register_transform
from onboard.ops.attention.dynamic_mask import kept_bias

_LENGTHS = (3, 24)
_SMALL, _SMALL_WINDOW = 5, 8
"""What takes the place of the number of keys that are kept, and of the window in which they are
chosen.
"""


@register_transform("match_dynamic_mask_attention")
class MatchDynamicMaskAttention(GraphTransform[TransformConfig]):
    """A mask over all keys has no paged form, but the keys' biases that it is computed from have.

    That a mask keeps the keys of the largest bias, and how many, is found by computing it from
    random biases.
    """

    keeps_shapes = False

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int:
        """Rewrite each causal attention with such a mask and nothing else."""
        matches = 0
        for node in nodes_of(gm, ATTENTION):
            found = arguments(node)
            window = found["sliding_window"]
            if not _is_plain(found) or (read := _read(gm, found["attn_mask"], window)) is None:
                continue
            bias, keep = read
            by_key = call(gm, node, aten.transpose.int, bias, 1, 2, like=node)
            tensors = [found[name] for name in ("query", "key", "value")]
            op = torch.ops.onboard.torch_dynamic_mask_attention.default
            replace_with(
                node, call(gm, node, op, *tensors, by_key, keep, found["scale"], window, like=node)
            )
            matches += 1
        return matches


def _is_plain(found: dict[str, Any]) -> bool:
    lacking = ("sinks", "logit_cap", "alibi_slopes", "chunk_size")
    plain = found["is_causal"] and found["dropout_p"] == 0.0 and found["layout"] == "bsnd"
    return (
        plain
        and isinstance(found["attn_mask"], fx.Node)
        and all(found[name] is None for name in lacking)
    )


def _read(gm: fx.GraphModule, mask: fx.Node, window: int | None) -> tuple[fx.Node, int] | None:
    """Return the biases [batch, kv_heads, keys] that a mask comes from and how many it keeps; None:
    another mask.

    The window that the attention has is one that the mask has to have, too, before it chooses.
    """
    before = ancestors([mask])
    tops = [node for node in before if is_op(node, aten.topk)]
    if len(tops) != 1:
        return None
    keep = _most(tops[0].args[1])
    order = [node for node in gm.graph.nodes if node in ancestors([tops[0]]) and _is_bias(node)]
    if keep is None or not order:
        return None
    matches = all(_keeps(gm, mask, order[-1], keep, window, length) for length in _LENGTHS)
    return (order[-1], keep) if matches else None


def _most(top: Any) -> int | None:
    """Return k of `sym_min(k, size)`."""
    constants = (
        [item for item in top.args if isinstance(item, int)] if is_op(top, torch.sym_min) else []
    )
    return constants[0] if len(constants) == 1 else None


def _is_bias(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return (
        node.op == "call_function"
        and isinstance(val, Tensor)
        and val.is_floating_point()
        and val.dim() == 3
    )


def _keeps(
    gm: fx.GraphModule, mask: fx.Node, source: fx.Node, keep: int, window: int | None, length: int
) -> bool:
    heads = source.meta["val"].shape[1]
    if not isinstance(heads, int):
        return False
    generator, dtype = torch.Generator().manual_seed(length), source.meta["val"].dtype
    bias = torch.randn(PROBED, heads, length, generator=generator, dtype=dtype)
    small = None if window is None else _SMALL if window == keep else _SMALL_WINDOW
    swaps = (
        {keep: _SMALL}
        if window is None or small is None
        else {window: small, -window: -small, keep: _SMALL}
    )
    actual = evaluate(gm, mask, length, swaps, {source: bias})
    if actual is None or actual.dim() != 4 or actual.shape[1] % heads:
        return False
    expected = kept_bias(
        bias.transpose(1, 2).to(actual.dtype), torch.arange(length).unsqueeze(1), _SMALL, small
    )
    expected = expected.repeat_interleave(actual.shape[1] // heads, dim=1)
    hidden = actual <= torch.finfo(actual.dtype).min / 2
    return torch.equal(actual.masked_fill(hidden, -torch.inf), expected)
