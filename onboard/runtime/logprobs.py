"""Log-probabilities of the chosen token and of the most likely ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onboard.modeling import ONE_CODEBOOK, Codebooks


def logprobs(
    rows: torch.Tensor, tokens: Sequence[int], count: int, codebooks: Codebooks = ONE_CODEBOOK
) -> list[dict[int, float]]:
    """Return for each row column -> log-probability, for its token and the `count` most likely ones;
    -1: all.

    `rows` are logits [tokens, vocabulary]. With several codebooks a column is codebook * codes +
    code, and each codebook has its own distribution and its own `count` entries.
    """
    values = codebooks.split(rows.float()).log_softmax(dim=-1).view(len(rows), codebooks.count, -1)
    firsts = torch.arange(0, rows.shape[-1], values.shape[-1], device=rows.device)
    chosen = codebooks.unpack(torch.tensor(tokens, device=rows.device)).view(len(rows), -1)
    best, ids = values.topk(values.shape[-1] if count < 0 else min(count, values.shape[-1]))
    columns = torch.cat([chosen + firsts, (ids + firsts[:, None]).flatten(1)], dim=1)
    found = torch.cat([values.gather(2, chosen[..., None])[..., 0], best.flatten(1)], dim=1)
    return [
        dict(zip(*row, strict=True)) for row in zip(columns.tolist(), found.tolist(), strict=True)
    ]
