"""Kimi Delta Attention: the gated delta rule with a decay of each channel (Kimi Team 2025,
arXiv:2510.26692).
"""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.delta_rule.cached_delta_rule import delta_state
from onboard.ops.delta_rule.delta_rule import LOOP_SCALES, fake_delta_rule, in_chunks
from onboard.ops.library import register_op
from onboard.ops.recurrences.advance import advance
from onboard.ops.ssm.ssm import wide_dtype
from onboard.ops.written_forms import CallForm, LoopForm, logarithms

_CHUNK = 16
"""Tokens at a time; their decay between each other, channel by channel, is [chunk, chunk, key_dim]
numbers a head.
"""
_LOOPS = tuple(
    LoopForm(
        ("bshk", "bshk", "bshv", "bshk", "bsh"),
        f"torch.ops.onboard.torch_kda(a, b, c, {decay}, e, {scale})",
    )
    for scale in LOOP_SCALES
    for decay in logarithms("d")
)


@register_op(
    fake_delta_rule,
    carries_state=True,
    described="Delta rule mixer with a decay for each channel",
    called_as=CallForm(
        "torch.ops.onboard.torch_kda(query, key, value, g, beta, None, use_qk_l2norm_in_kernel)",
        fixed={"initial_state": None, "output_final_state": False},
        ignored=frozenset({"chunk_size"}),
        settings=({"use_qk_l2norm_in_kernel": True}, {"chunk_size": 8}),
        with_state=True,
    ),
    looped_as=_LOOPS,
    hinted=True,
)
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

    state <- diag(exp(g)) state; state <- state + beta k (v - k^T state)^T; out = scale q^T state.
    Within a chunk the corrections of all tokens solve one triangular system, as in
    `torch_gated_delta_rule`.

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
    state = torch.zeros(
        (q.shape[0], *q.shape[2:], v.shape[3]), dtype=wide_dtype(q), device=q.device
    )
    return in_chunks(_kda_chunk, _CHUNK, q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, state)[0]


@register_op(fake_delta_rule, mutates=("kda_cache",), cached_form_of="torch_kda", state=delta_state)
def torch_cached_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    kda_cache: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> Tensor:
    """`torch_kda` of a flat row of tokens.

    Args:
        q, k, v, g, beta, scale, use_qk_l2norm_in_kernel: as in `torch_kda`, with a batch of one
            row.
        cu_seqlens, kv_lens, state_slots, batch_info_host: as in
            `onboard.ops.recurrences.advance.advance`.
        kda_cache: [slots, heads, key_dim, value_dim], in the recurrence's own dtype; written to.

    Returns:
        Like v, in q's dtype; zeros for tokens beyond the last sequence.
    """

    def step(
        state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        return in_chunks(
            _kda_chunk, _CHUNK, q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, state
        )

    out = fake_delta_rule(q, k, v).zero_()
    return advance(
        step, [q, k, v, g, beta], out, cu_seqlens, kv_lens, state_slots, batch_info_host, kda_cache
    )


def _kda_chunk(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a chunk's outputs [batch, heads, tokens, value_dim] and the state [.., key_dim,
    value_dim] behind it.
    """
    total = decay.cumsum(-2)
    rate = rate.unsqueeze(-1)
    later = torch.ones(
        total.shape[-2], total.shape[-2], dtype=torch.bool, device=total.device
    ).triu(1)
    between = (
        (total.unsqueeze(-2) - total.unsqueeze(-3))
        .masked_fill(later.unsqueeze(-1), -torch.inf)
        .exp()
    )
    reached = total.exp()
    system = rate * torch.einsum("...ic,...jc,...ijc->...ij", key, key, between).tril(-1)
    wanted = rate * (value - (key * reached) @ state)
    corrections = wanted  # the system of one token is the identity
    if key.shape[2] > 1:
        corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    weights = torch.einsum("...ic,...jc,...ijc->...ij", query, key, between)
    out = (query * reached) @ state + weights @ corrections
    left = (total[..., -1:, :] - total).exp()
    return out, state * reached[..., -1, :].unsqueeze(-1) + (key * left).transpose(
        -1, -2
    ) @ corrections
