"""mLSTM, the matrix memory of xLSTM with exponential gates."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from onboard.ops.library import State, register_op
from onboard.ops.recurrences.advance import advance
from onboard.ops.ssm.ssm import log_pairwise_decay, wide_dtype
from onboard.ops.written_forms import CallForm

_CHUNK = 64


def fake_mlstm(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    """Return an empty output: like v, in q's dtype."""
    return q.new_empty(v.shape)


@register_op(
    fake_mlstm,
    carries_state=True,
    described="Matrix LSTM mixer",
    called_as_module=CallForm(
        "torch.ops.onboard.torch_mlstm(query, key, value, igate, fgate, eps)",
        turned=frozenset({"query", "key", "value", "igate", "fgate"}),
        with_state=True,
    ),
    hinted=True,
)
def torch_mlstm(
    q: Tensor, k: Tensor, v: Tensor, igate: Tensor, fgate: Tensor, eps: float
) -> Tensor:
    """The matrix LSTM (Beck et al. 2024, "xLSTM", arXiv:2405.04517, equations 19 to 27).

    memory <- sigmoid(fgate) memory + exp(igate) k v^T, norm <- sigmoid(fgate) norm + exp(igate) k,
    with q scaled by key_dim ** -0.5; out = q^T memory / max(|q^T norm|, 1). Both are kept divided
    by exp(m), m <- max(log sigmoid(fgate) + m, igate) from zero on, and eps is added to the divisor
    in that scale. Within a chunk the recurrence is a masked matrix product (Beck et al. 2025,
    arXiv:2503.14376).

    Args:
        q, k: [batch, sequence, heads, key_dim].
        v: [batch, sequence, heads, value_dim].
        igate, fgate: [batch, sequence, heads], before their activations.
        eps: added to the divisor.

    Returns:
        Like v, in q's dtype.
    """
    shape = (q.shape[0], q.shape[2], q.shape[3] + 1, v.shape[3] + 1)
    return _mlstm(
        q, k, v, igate, fgate, eps, torch.zeros(shape, dtype=wide_dtype(q), device=q.device)
    )[0]


def _state(k: Tensor, v: Tensor, **_: object) -> State:
    return (v.shape[2], k.shape[3] + 1, v.shape[3] + 1), wide_dtype(v)


@register_op(fake_mlstm, mutates=("mlstm_cache",), cached_form_of="torch_mlstm", state=_state)
def torch_cached_mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    igate: Tensor,
    fgate: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    mlstm_cache: Tensor,
    eps: float,
) -> Tensor:
    """`torch_mlstm` of a flat row of tokens.

    Args:
        q, k, v, igate, fgate, eps: as in `torch_mlstm`, with a batch of one row.
        cu_seqlens, kv_lens, state_slots, batch_info_host: as in
            `onboard.ops.recurrences.advance.advance`.
        mlstm_cache: [slots, heads, key_dim + 1, value_dim + 1], in the recurrence's own dtype: the
            memory, its norm as the last column, m in the last row; written to.

    Returns:
        Like v, in q's dtype; zeros for tokens beyond the last sequence.
    """

    def step(
        state: Tensor, q: Tensor, k: Tensor, v: Tensor, igate: Tensor, fgate: Tensor
    ) -> tuple[Tensor, Tensor]:
        return _mlstm(q, k, v, igate, fgate, eps, state)

    out = fake_mlstm(q, k, v).zero_()
    inputs = [q, k, v, igate, fgate]
    return advance(
        step, inputs, out, cu_seqlens, kv_lens, state_slots, batch_info_host, mlstm_cache
    )


def _mlstm(
    q: Tensor, k: Tensor, v: Tensor, igate: Tensor, fgate: Tensor, eps: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs that follow a state, and the state behind them."""
    wide = state.dtype
    query, key, value, gate, kept = (
        item.to(wide).transpose(1, 2) for item in (q, k, v, igate, fgate)
    )
    query, kept = query * query.shape[-1] ** -0.5, F.logsigmoid(kept)
    # So that the norm is a column of the memory
    value = torch.cat([value, torch.ones_like(value[..., :1])], dim=-1)
    memory, scale = state[:, :, :-1], state[:, :, -1, :1]
    out = torch.empty_like(value[..., :-1])
    for start in range(0, value.shape[2], _CHUNK):
        part = slice(start, start + _CHUNK)
        gates = gate[:, :, part], kept[:, :, part]
        out[:, :, part], memory, scale = _mlstm_chunk(
            query[:, :, part], key[:, :, part], value[:, :, part], *gates, memory, scale, eps
        )
    last_row = scale.unsqueeze(-1).expand(-1, -1, 1, memory.shape[-1])
    return out.transpose(1, 2).to(q.dtype).contiguous(), torch.cat([memory, last_row], dim=2)


def _mlstm_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    kept: Tensor,
    memory: Tensor,
    scale: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a chunk's outputs [batch, heads, tokens, value_dim], and memory and scale [.., 1]
    behind it.
    """
    total = kept.cumsum(-1)
    # [batch, heads, tokens, tokens before]
    between = log_pairwise_decay(total) + gate.unsqueeze(-2)
    before = total + scale
    most = torch.maximum(before, between.amax(-1))
    weights = query @ key.transpose(-1, -2) * (between - most.unsqueeze(-1)).exp()
    sums = (query * (before - most).exp().unsqueeze(-1)) @ memory + weights @ value
    out = sums[..., :-1] / (torch.maximum(sums[..., -1:].abs(), (-most).exp().unsqueeze(-1)) + eps)
    after = most[..., -1:]
    added = key * (total[..., -1:] - total + gate - after).exp().unsqueeze(-1)
    return (
        out,
        memory * (before[..., -1:] - after).exp()[..., None] + added.transpose(-1, -2) @ value,
        after,
    )
