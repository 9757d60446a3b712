"""What the language-model head reads of each token, by itself, kept and read again: heads that
predict further tokens begin with it.
"""

from __future__ import annotations

from torch import Tensor

from onboard.ops.attention.cached_attention import write_tokens
from onboard.ops.hidden_states.residual_add import kept_hidden_states
from onboard.ops.library import register_op


@register_op(inserted=True)
def torch_head_input(hidden_states: Tensor) -> Tensor:
    """Return hidden states [batch, sequence, hidden] as they are: it marks what the head reads."""
    return hidden_states.clone()


@register_op(
    lambda hidden_states, *_: hidden_states.clone(),
    mutates=("hidden_cache",),
    cached_form_of="torch_head_input",
    row_wise=True,
)
def torch_cached_head_input(
    hidden_states: Tensor, slot_mapping: Tensor, hidden_cache: Tensor
) -> Tensor:
    """`torch_head_input` of a flat row of tokens, whose hidden states are kept.

    Args:
        hidden_states: [1, tokens, hidden].
        slot_mapping: [tokens] int64, page * page_size + offset of each token.
        hidden_cache: [pages, 1, page_size, hidden], written to.

    Returns:
        [1, tokens, hidden].
    """
    write_tokens(hidden_cache, hidden_states[0].unsqueeze(1), slot_mapping)
    return hidden_states.clone()


@register_op(inserted=True, row_wise=True)
def torch_kept_head_input(slot_mapping: Tensor, hidden_cache: Tensor) -> Tensor:
    """Return what `torch_cached_head_input` has kept of tokens, [1, tokens, hidden], given their
    slots [tokens] int64.
    """
    return kept_hidden_states(hidden_cache, slot_mapping)[None]
