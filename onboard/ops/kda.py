"""Kimi Delta Attention: the gated delta rule with a decay of each channel (Kimi Team 2025, arXiv:2510.26692)."""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.library import register_op
from onboard.ops.norm import torch_l2norm
from onboard.ops.ssm import wide_dtype

_CHUNK = 16
"""Tokens at a time; their decay between each other, channel by channel, is [chunk, chunk, key_dim] numbers a head."""
_L2_EPS = 1e-6


def _fake_kda(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> Tensor:
    return q.new_empty(v.shape)


@register_op(_fake_kda)
def torch_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> Tensor:
    """Linear attention with a decay of each channel and correction (section 3 there).

    state <- diag(exp(g)) state; state <- state + beta k (v - k^T state)^T; out = scale q^T state. Within a chunk the
    corrections of all tokens solve one triangular system, as in `torch_gated_delta_rule`.

    Args:
        q, k: [batch, sequence, heads, key_dim].
        v: [batch, sequence, heads, value_dim].
        g: [batch, sequence, heads, key_dim], logarithm of the decay, not positive.
        beta: [batch, sequence, heads], rate of the correction.
        scale: factor of q; None: key_dim ** -0.5.
        use_qk_l2norm_in_kernel: scale q and k to length one first (epsilon 1e-6).

    Returns:
        Like v, in q's dtype.
    """
    query, key, value, decay = (item.to(wide_dtype(q)).transpose(1, 2) for item in (q, k, v, g))
    rate = beta.to(value.dtype).transpose(1, 2).unsqueeze(-1)
    if use_qk_l2norm_in_kernel:
        query, key = torch_l2norm(query, _L2_EPS), torch_l2norm(key, _L2_EPS)
    query = query * (key.shape[-1] ** -0.5 if scale is None else scale)
    state = value.new_zeros((*key.shape[:2], key.shape[-1], value.shape[-1]))
    out = torch.empty_like(value)
    for start in range(0, value.shape[2], _CHUNK):
        part = slice(start, start + _CHUNK)
        out[:, :, part], state = _kda_chunk(
            query[:, :, part], key[:, :, part], value[:, :, part], decay[:, :, part], rate[:, :, part], state
        )
    return out.transpose(1, 2).to(q.dtype).contiguous()


def _kda_chunk(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a chunk's outputs [batch, heads, tokens, value_dim] and the state [.., key_dim, value_dim] behind it."""
    total = decay.cumsum(-2)
    later = torch.ones(total.shape[-2], total.shape[-2], dtype=torch.bool, device=total.device).triu(1)
    between = (total.unsqueeze(-2) - total.unsqueeze(-3)).masked_fill(later.unsqueeze(-1), -torch.inf).exp()
    reached = total.exp()
    system = rate * torch.einsum("...ic,...jc,...ijc->...ij", key, key, between).tril(-1)
    wanted = rate * (value - (key * reached) @ state)
    corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    weights = torch.einsum("...ic,...jc,...ijc->...ij", query, key, between)
    out = (query * reached) @ state + weights @ corrections
    left = (total[..., -1:, :] - total).exp()
    return out, state * reached[..., -1, :].unsqueeze(-1) + (key * left).transpose(-1, -2) @ corrections
