"""Reference of the gates of a gated delta rule, which transforms put in."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from onboard.ops.library import register_op


@register_op(inserted=True)
def torch_fused_gdn_gating(
    a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """The decay and the rate of correction of a gated delta rule (Yang et al. 2024,
    arXiv:2412.06464).

    Args:
        a, b: [..., heads], the projections that both come from.
        rate: [heads], -exp(A_log): how fast a head forgets.
        dt_bias: [heads].

    Returns:
        The decay's logarithm rate * softplus(a + dt_bias) [..., heads], in float32, and sigmoid(b),
        like b.
    """
    return rate.float() * F.softplus(a.float() + dt_bias.float()), b.sigmoid()
