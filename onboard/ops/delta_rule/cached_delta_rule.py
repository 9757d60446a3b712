"""The delta rule, gated or not, with a cache of each sequence's state."""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.delta_rule.delta_rule import delta_rule, fake_delta_rule
from onboard.ops.library import State, register_op
from onboard.ops.recurrences.advance import advance
from onboard.ops.ssm.ssm import wide_dtype


def delta_state(k: Tensor, v: Tensor, **_: object) -> State:
    """Return what a cached delta rule keeps of each sequence."""
    return (v.shape[2], k.shape[3], v.shape[3]), wide_dtype(v)


@register_op(
    fake_delta_rule,
    mutates=("delta_cache",),
    cached_form_of="torch_gated_delta_rule",
    state=delta_state,
)
def torch_cached_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    delta_cache: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> Tensor:
    """`torch_gated_delta_rule` of a flat row of tokens.

    Args:
        q, k, v, g, beta, scale, use_qk_l2norm_in_kernel: as in `torch_gated_delta_rule`, with a
            batch of one row.
        cu_seqlens, kv_lens, state_slots, batch_info_host: as in
            `onboard.ops.recurrences.advance.advance`.
        delta_cache: [slots, value_heads, key_dim, value_dim], in the recurrence's own dtype;
            written to.

    Returns:
        Like v, in q's dtype; zeros for tokens beyond the last sequence.
    """

    def step(
        state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        return delta_rule(q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, state)

    out = fake_delta_rule(q, k, v).zero_()
    return advance(
        step,
        [q, k, v, g, beta],
        out,
        cu_seqlens,
        kv_lens,
        state_slots,
        batch_info_host,
        delta_cache,
    )


@register_op(
    fake_delta_rule, mutates=("delta_cache",), cached_form_of="torch_delta_rule", state=delta_state
)
def torch_cached_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    delta_cache: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> Tensor:
    """`torch_delta_rule` of a flat row of tokens; arguments and result as in
    `torch_cached_gated_delta_rule`.
    """
    metadata = (cu_seqlens, kv_lens, state_slots, batch_info_host)
    g = torch.zeros_like(beta)
    return torch_cached_gated_delta_rule(
        q, k, v, g, beta, *metadata, delta_cache, scale, use_qk_l2norm_in_kernel
    )
