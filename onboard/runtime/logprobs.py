"""Log-probabilities of the chosen token and of the most likely ones."""

from __future__ import annotations

import torch

from onboard.modeling import ONE_CODEBOOK, Codebooks


def logprobs(
    row: torch.Tensor, token: int, count: int, codebooks: Codebooks = ONE_CODEBOOK
) -> dict[int, float]:
    """Return column -> log-probability, for the chosen token and the `count` most likely tokens.

    `row` is a token's logits [vocabulary]. With several codebooks a column is codebook * codes +
    code, and each codebook has its own distribution and its own `count` entries.
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
