"""The sum that ends a layer, by itself and kept for each token: what a draft model reads of the
model it drafts for.
"""

from __future__ import annotations

from torch import Tensor

from onboard.ops.attention.cached_attention import write_tokens
from onboard.ops.library import register_op


@register_op(inserted=True)
def torch_residual_add(hidden_states: Tensor, residual: Tensor) -> Tensor:
    """Add what a layer's last block gives to what went around it, [batch, sequence, hidden]
    each.
    """
    return hidden_states + residual


@register_op(
    lambda hidden_states, residual, *_: hidden_states + residual,
    mutates=("hidden_cache",),
    cached_form_of="torch_residual_add",
    row_wise=True,
)
def torch_cached_residual_add(
    hidden_states: Tensor, residual: Tensor, slot_mapping: Tensor, hidden_cache: Tensor
) -> Tensor:
    """`torch_residual_add` of a flat row of tokens, whose sums are kept.

    Args:
        hidden_states, residual: [1, tokens, hidden].
        slot_mapping: [tokens] int64, page * page_size + offset of each token.
        hidden_cache: [pages, 1, page_size, hidden], written to.

    Returns:
        [1, tokens, hidden].
    """
    total = hidden_states + residual
    write_tokens(hidden_cache, total[0].unsqueeze(1), slot_mapping)
    return total


def kept_hidden_states(hidden_cache: Tensor, slots: Tensor) -> Tensor:
    """Return what `torch_cached_residual_add` has kept of tokens, [tokens, hidden], given their
    slots [tokens].
    """
    size = hidden_cache.shape[2]
    return hidden_cache[slots // size, 0, slots % size]
