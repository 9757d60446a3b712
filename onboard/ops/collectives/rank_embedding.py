"""Look-up of tokens in a table whose rows are divided among the ranks."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from onboard.ops.library import register_op


def _fake_lookup(ids: Tensor, weight: Tensor, first: int) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


@register_op(_fake_lookup, inserted=True, row_wise=True)
def embedding_of_rank(ids: Tensor, weight: Tensor, first: int) -> Tensor:
    """Look up tokens of which a rank has some; the sum over the ranks is the embedding.

    Args:
        ids: [...] int64.
        weight: [tokens, hidden], this rank's rows of the table.
        first: the token of its first row.

    Returns:
        [..., hidden] in the weight's dtype: zeros for the tokens of other ranks.
    """
    if weight.device.type == "cuda":
        from onboard.ops.collectives.triton_rank_embedding import lookup

        return lookup(ids, weight, first)
    local = ids - first
    inside = local.clamp(0, len(weight) - 1)
    return F.embedding(inside, weight).masked_fill((local != inside).unsqueeze(-1), 0)
