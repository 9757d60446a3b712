"""Lightning attention: linear attention whose heads forget at constant rates."""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.library import State, register_op
from onboard.ops.recurrences.advance import advance
from onboard.ops.ssm.ssm import decaying_chunk, wide_dtype
from onboard.ops.written_forms import SCALED, LoopForm, logarithms

_CHUNK = 64

_LOOPS = tuple(
    LoopForm(
        ("bshk", "bshk", "bshv", "h"),
        f"torch.ops.onboard.torch_lightning_attention({q}, b, c, {d})",
    )
    for q in ("a", SCALED.format("a"))
    for d in ("d", f"-{logarithms('d')[1]}")
)


def fake_lightning_attention(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    """Return an empty output: like v, in q's dtype."""
    return q.new_empty(v.shape)


@register_op(
    fake_lightning_attention,
    carries_state=True,
    described="Linear attention with constant decay",
    looped_as=_LOOPS,
    hinted=True,
)
def torch_lightning_attention(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """Linear attention with a decay of each head (Qin et al. 2024, "Lightning Attention-2",
    arXiv:2401.04658).

    state <- exp(-slope) state + k^T v; out = q state. Within a chunk the recurrence is a masked
    matrix product, from chunk to chunk it is carried by the state.

    Args:
        q, k: [batch, sequence, heads, key_dim].
        v: [batch, sequence, heads, value_dim].
        slopes: [heads], not negative.

    Returns:
        Like v, in q's dtype.
    """
    state = torch.zeros(
        (q.shape[0], q.shape[2], v.shape[3], q.shape[3]), dtype=wide_dtype(q), device=q.device
    )
    return _lightning_attention(q, k, v, slopes, state)[0]


def _state(k: Tensor, v: Tensor, **_: object) -> State:
    return (v.shape[2], v.shape[3], k.shape[3]), wide_dtype(v)


@register_op(
    fake_lightning_attention,
    mutates=("lightning_cache",),
    cached_form_of="torch_lightning_attention",
    state=_state,
)
def torch_cached_lightning_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    lightning_cache: Tensor,
) -> Tensor:
    """`torch_lightning_attention` of a flat row of tokens.

    Args:
        q, k, v, slopes: as in `torch_lightning_attention`, with a batch of one row.
        cu_seqlens, kv_lens, state_slots, batch_info_host: as in
            `onboard.ops.recurrences.advance.advance`.
        lightning_cache: [slots, heads, value_dim, key_dim], in the recurrence's own dtype; written
            to.

    Returns:
        Like v, in q's dtype; zeros for tokens beyond the last sequence.
    """

    def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return _lightning_attention(q, k, v, slopes, state)

    out = fake_lightning_attention(q, k, v).zero_()
    return advance(
        step, [q, k, v], out, cu_seqlens, kv_lens, state_slots, batch_info_host, lightning_cache
    )


def _lightning_attention(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs that follow a state [batch, heads, value_dim, key_dim], and the state
    behind them.
    """
    query, key, value = (item.to(state.dtype) for item in (q, k, v))
    decay = -slopes.to(state.dtype).expand(query.shape[:3])
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    for start in range(0, value.shape[1], _CHUNK):
        part = slice(start, start + _CHUNK)
        out[:, part], state = decaying_chunk(
            value[:, part], decay[:, part], key[:, part], query[:, part], state
        )
    return out.to(q.dtype), state
