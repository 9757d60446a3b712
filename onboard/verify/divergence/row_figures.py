"""Two next-token distributions compared, position by position, over the whole vocabulary.

All is computed in float64. In float32 the logarithm of a row's sum of exponentials is rounded by
1e-6, which would be the divergence of two ways of running that differ by rounding alone: a
divergence grows with the square of what the logits differ by.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

_NUMBERS = 2**22
"""Logits of one chunk: its float64 tensors take 32 MiB each."""
_BEST = 5


@dataclass(frozen=True)
class RowFigures:
    """One number a position, [positions] float64 on the CPU."""

    divergence: torch.Tensor
    """KL(A || B) in nats (Kullback and Leibler 1951, equation 2.4)."""
    same_best: torch.Tensor
    """1 where B's most likely token is A's; where A has several alike, one of them."""
    same_five: torch.Tensor
    """The share of B's five most likely tokens that A finds as likely as its fifth, or likelier."""
    loss_a: torch.Tensor
    """A's negative log-likelihood of the token that follows, in nats."""
    loss_b: torch.Tensor

    @classmethod
    def joined(cls, parts: list[RowFigures]) -> RowFigures:
        """Return the positions of all parts, one part after the other."""
        return cls(
            *(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls))
        )


def compare_rows(
    a: torch.Tensor, b: torch.Tensor, targets: torch.Tensor, device: torch.device
) -> RowFigures:
    """Compare logits [positions, vocabulary] of A and B, on the device in chunks.

    `targets` [positions] int64 are the tokens that follow.
    """
    rows = max(1, _NUMBERS // a.shape[-1])
    chunks = zip(*(torch.split(each, rows) for each in (a, b, targets)), strict=True)
    return RowFigures.joined([_compare(*(each.to(device) for each in chunk)) for chunk in chunks])


def _compare(a: torch.Tensor, b: torch.Tensor, targets: torch.Tensor) -> RowFigures:
    a, b = a.double().log_softmax(dim=-1), b.double().log_softmax(dim=-1)
    chosen = b.topk(min(_BEST, b.shape[-1]), dim=-1).indices
    best, least = _bounds(a)
    likely = a.gather(-1, chosen) >= least
    figures = (
        _divergence(a, b),
        a.gather(-1, b.argmax(dim=-1, keepdim=True))[:, 0] == best,
        likely.double().mean(dim=-1),
        -a.gather(-1, targets[:, None])[:, 0],
        -b.gather(-1, targets[:, None])[:, 0],
    )
    return RowFigures(*(each.double().cpu() for each in figures))


def _divergence(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return sum(exp(a) * (a - b)) of each row; what A finds impossible adds nothing."""
    share = a.exp()
    terms = torch.where(share > 0, share * (a - b), 0.0)
    # It is never below 0 but by rounding
    return terms.sum(dim=-1).clamp_min(0.0)


def _bounds(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest value of each row [rows], and the fifth largest [rows, 1]."""
    highest = a.topk(min(_BEST, a.shape[-1]), dim=-1).values
    return highest[:, 0], highest[:, -1:]
