"""What is told of the likely tokens beside the chosen one."""

from __future__ import annotations

import torch

from onboard.modeling import ONE_CODEBOOK, Codebooks


def logprobs(
    row: torch.Tensor, token: int, count: int, codebooks: Codebooks = ONE_CODEBOOK
) -> dict[int, float]:
    """Return log-probabilities by column of `row`, of the chosen one and the `count` most likely
    ones of a codebook.

    `row` are logits; a column is a token's id, or a code's behind all codes of earlier codebooks.
    """
    values = codebooks.split(row.float()).log_softmax(dim=-1)
    firsts = torch.arange(0, len(row), values.shape[-1], device=row.device)
    chosen = codebooks.unpack(torch.tensor(token, device=row.device)) + firsts
    best, ids = values.topk(min(count, values.shape[-1]))
    columns = torch.cat([chosen, (ids + firsts[:, None]).flatten()])
    return dict(
        zip(
            columns.tolist(),
            torch.cat([values.flatten()[chosen], best.flatten()]).tolist(),
            strict=True,
        )
    )
