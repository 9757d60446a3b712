"""The router of a mixture of experts: which experts a token goes to, and with what weights."""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.config import suggest
from onboard.errors import UsageError
from onboard.ops.library import register_op

SCORINGS = ("softmax", "sigmoid")


def fake_router(logits: Tensor, top_k: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    """Return empty outputs of `torch_moe_router`."""
    shape = (*logits.shape[:-1], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


@register_op(fake_router, inserted=True)
def torch_moe_router(
    logits: Tensor,
    top_k: int,
    normalize: bool = True,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    scale: float = 1.0,
    epsilon: float = 0.0,
    groups: int = 1,
    top_groups: int = 1,
    group_top: int = 1,
) -> tuple[Tensor, Tensor]:
    """Score the experts, choose the best ones, and weigh these by their scores (DeepSeek-V3,
    arXiv:2412.19437, 2.1.2).

    Args:
        logits: [..., experts].
        top_k: how many experts a token goes to.
        normalize: divide the weights by their sum and `epsilon`.
        scoring: "softmax" or "sigmoid", in float32.
        bias: [experts], added to the scores for the choice alone, or None.
        scale: of the weights.
        groups: consecutive experts form this many groups of one size. A token goes to experts of
            the `top_groups` groups whose `group_top` best experts have the largest sum of (biased)
            scores.

    Returns:
        Weights [..., top_k] float32 and experts [..., top_k] int64, the best first.

    Raises:
        UsageError: unknown scoring.
    """
    check_scoring(scoring)
    scores = logits.float().softmax(-1) if scoring == "softmax" else logits.float().sigmoid()
    choice = scores if bias is None else scores + bias
    if groups > 1:
        choice = _in_best_groups(choice, groups, top_groups, group_top)
    experts = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + epsilon)
    return weights * scale, experts


def check_scoring(scoring: str) -> None:
    """Refuse a scoring that there is not."""
    if scoring not in SCORINGS:
        raise UsageError(f"there is no scoring {scoring!r}", hint=suggest(scoring, SCORINGS))


def _in_best_groups(choice: Tensor, groups: int, top_groups: int, group_top: int) -> Tensor:
    """Return the scores with -inf for the experts of all but the best groups."""
    by_group = choice.view(*choice.shape[:-1], groups, -1)
    best = by_group.topk(group_top, dim=-1).values.sum(dim=-1).topk(top_groups, dim=-1).indices
    kept = torch.zeros(by_group.shape[:-1], dtype=torch.bool, device=choice.device).scatter(
        -1, best, True
    )
    return by_group.masked_fill(~kept.unsqueeze(-1), -torch.inf).view(choice.shape)
