"""A graph of PyTorch's operators alone: each call of ours as what it computes.

Most functions behind our operators are traced as they are. Attention is written out once more,
since its own function chooses a kernel by sizes, which are symbols here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from onboard.graph.fx import copy_graphs
from onboard.ops.library import plain_function


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    sinks: Tensor | None,
    sliding_window: int | None,
    logit_cap: float | None,
    alibi_slopes: Tensor | None,
    chunk_size: int | None,
    **_: object,
) -> Tensor:
    """`torch_attention` in layout bnsd for a causal call without a mask, whatever the sizes; the
    result is [batch, heads, sq, value_dim].
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    sq, sk = query.shape[2], key.shape[2]
    places = torch.arange(sk - sq, sk, device=query.device).unsqueeze(1)
    keys = torch.arange(sk, device=query.device)
    seen = places >= keys
    if sliding_window is not None:
        seen = seen & (places - keys < sliding_window)
    if chunk_size is not None:
        seen = seen & (places // chunk_size == keys // chunk_size)
    if sinks is None and logit_cap is None and alibi_slopes is None:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, seen, scale=scale, enable_gqa=grouped
        )
    scores = _scores(query, key) * scale
    if logit_cap is not None:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.to(scores.dtype).view(1, -1, 1, 1) * (keys - places)
    weights = _softmax(scores.masked_fill(~seen, -torch.inf), sinks).to(query.dtype)
    return (_grouped(weights, value) @ value.unsqueeze(2)).flatten(1, 2)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """Return the scores [batch, heads, sq, sk], float32 or wider."""
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = key.to(wide).unsqueeze(2).transpose(-2, -1)
    return (_grouped(query.to(wide), key) @ keys).flatten(1, 2)


def _grouped(rows: Tensor, key: Tensor) -> Tensor:
    """Return what the heads have, [batch, heads, ...], by key head: [batch, kv_heads, heads of one,
    ...].
    """
    return torch.unflatten(rows, 1, (key.shape[1], rows.shape[1] // key.shape[1]))


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax over keys; sinks [heads] are one more score, and no key."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


_WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    torch.ops.onboard.torch_attention.default: attention,
}


def with_traceable_ops(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph, of the same tensors, that calls functions which torch.export can
    trace.
    """
    twin = copy_graphs(gm)
    assert isinstance(twin, fx.GraphModule)
    for node in twin.graph.nodes:
        if node.op == "call_function":
            node.target = _WRITTEN_OUT.get(node.target) or plain_function(node.target)
    twin.recompile()
    return twin
