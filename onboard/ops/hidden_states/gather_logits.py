"""Selection of the rows whose logits are wanted."""

from __future__ import annotations

from torch import Tensor

from onboard.ops.library import register_op


@register_op(inserted=True, row_wise=True)
def gather_logits_before_lm_head(hidden: Tensor, logits_gather_indices: Tensor) -> Tensor:
    """Keep only the rows that the language-model head needs.

    Args:
        hidden: [1, tokens, hidden].
        logits_gather_indices: [n] int64, rows of `hidden`.

    Returns:
        [1, n, hidden].
    """
    return hidden.index_select(1, logits_gather_indices)
