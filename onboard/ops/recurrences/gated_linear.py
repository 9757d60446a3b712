"""Gated linear attention: linear attention whose channels forget at rates of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.library import State, register_op
from onboard.ops.recurrences.advance import advance
from onboard.ops.recurrences.channel_decays import moved, until, until_end
from onboard.ops.ssm.ssm import wide_dtype
from onboard.ops.written_forms import SCALED, CallForm, LoopForm, logarithms

_CHUNK = 16
"""Tokens at a time; their decay between each other, channel by channel, is [chunk, chunk, key_dim]
numbers a head.
"""


_SPREAD = "{}.unsqueeze(-1).expand_as(b)"
_DECAYS = (
    *(("bshk", decay) for decay in logarithms("d")),
    *(("bsh", _SPREAD.format(decay)) for decay in logarithms("d")),
)
_SHAPES = ("bshk", "bshk", "bshv")
_CALL = "torch.ops.onboard.torch_gated_linear_attention({q}, b, c, {g})"
_LOOPS = (
    *(
        LoopForm((*_SHAPES, shape, "hk"), _CALL.format(q=q, g=f"{decay}, e"))
        for q in ("a", SCALED.format("a"))
        for shape, decay in _DECAYS
    ),
    *(
        LoopForm((*_SHAPES, shape), _CALL.format(q=q, g=decay))
        for q in ("a", SCALED.format("a"))
        for shape, decay in _DECAYS
    ),
    *(
        LoopForm(_SHAPES, _CALL.format(q=q, g="torch.zeros_like(b)"))
        for q in ("a", SCALED.format("a"))
    ),
)


def _called_as(decay: str) -> CallForm:
    """Return how RWKV's functions are called whose `time_decay`, its logarithm's logarithm, becomes
    `decay`: their tensors are [batch, sequence, channels], but `time_first` [heads, head_dim].
    """
    q, k, v = (
        f"{key}.float().view(*{key}.shape[:2], *time_first.shape)"
        for key in ("receptance", "key", "value")
    )
    return CallForm(
        f"torch.ops.onboard.torch_gated_linear_attention({q}, {k}, {v}, {decay}, time_first)",
        ignored=frozenset({"training"}),
        empty=frozenset({"state"}),
        with_state=True,
    )


def fake_gated_linear_attention(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    """Return an empty output: like v, in q's dtype."""
    return q.new_empty(v.shape)


@register_op(
    fake_gated_linear_attention,
    carries_state=True,
    described="Linear attention with a decay for each channel",
    called_as=(
        _called_as("-time_decay.float().exp().view(*receptance.shape[:2], *time_first.shape)"),
        _called_as("-time_decay.float().exp().expand(*receptance.shape[:2], *time_first.shape)"),
    ),
    looped_as=_LOOPS,
    hinted=True,
)
def torch_gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, first: Tensor | None = None
) -> Tensor:
    """Linear attention with a decay of each channel (Yang et al. 2023, arXiv:2312.06635, section 4).

    state <- diag(exp(g)) state + k^T v; out = q state. With `first` a token is read before the
    state takes it up, in a weight of its own (RWKV 5 and 6, Peng et al. 2024, arXiv:2404.05892,
    section 4): out = q (state + diag(first) k^T v); state <- diag(exp(g)) state + k^T v.

    Args:
        q, k: [batch, sequence, heads, key_dim].
        v: [batch, sequence, heads, value_dim].
        g: [batch, sequence, heads, key_dim], logarithm of the decay, not positive.
        first: [heads, key_dim], the weight of the token itself, or None.

    Returns:
        Like v, in q's dtype.
    """
    state = torch.zeros(
        (q.shape[0], *q.shape[2:], v.shape[3]), dtype=wide_dtype(q), device=q.device
    )
    return _gated_linear_attention(q, k, v, g, first, state)[0]


def _state(k: Tensor, v: Tensor, **_: object) -> State:
    return (v.shape[2], k.shape[3], v.shape[3]), wide_dtype(v)


@register_op(
    fake_gated_linear_attention,
    mutates=("gla_cache",),
    cached_form_of="torch_gated_linear_attention",
    state=_state,
)
def torch_cached_gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    gla_cache: Tensor,
    first: Tensor | None = None,
) -> Tensor:
    """`torch_gated_linear_attention` of a flat row of tokens.

    Args:
        q, k, v, g, first: as in `torch_gated_linear_attention`, with a batch of one row.
        cu_seqlens, kv_lens, state_slots, batch_info_host: as in
            `onboard.ops.recurrences.advance.advance`.
        gla_cache: [slots, heads, key_dim, value_dim], in the recurrence's own dtype; written to.

    Returns:
        Like v, in q's dtype; zeros for tokens beyond the last sequence.
    """

    def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return _gated_linear_attention(q, k, v, g, first, state)

    out = fake_gated_linear_attention(q, k, v).zero_()
    return advance(
        step, [q, k, v, g], out, cu_seqlens, kv_lens, state_slots, batch_info_host, gla_cache
    )


def _gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, first: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs that follow a state [batch, heads, key_dim, value_dim], and the state
    behind them.
    """
    inputs = [item.to(state.dtype).transpose(1, 2) for item in (q, k, v, g)]
    weight = None if first is None else first.to(state.dtype).unsqueeze(1)
    out = torch.empty_like(inputs[2], memory_format=torch.contiguous_format)
    for start in range(0, out.shape[2], _CHUNK):
        part = slice(start, start + _CHUNK)
        out[:, :, part], state = _chunk([item[:, :, part] for item in inputs], weight, state)
    return out.transpose(1, 2).to(q.dtype).contiguous(), state


def _chunk(inputs: list[Tensor], first: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return a chunk's outputs [batch, heads, tokens, value_dim] and the state behind it."""
    query, key, value, decay = inputs
    before = 0 if first is None else 1  # how far back a token finds the state
    seen = moved(decay, before)
    weights = torch.einsum("bhic,bhjc,bhijc->bhij", query, key, until(seen, before)).tril(-before)
    if first is not None:
        weights = weights + torch.diag_embed((query * first * key).sum(-1))
    out = (query * seen.cumsum(2).exp()) @ state + weights @ value
    kept = state * decay.sum(2).exp().unsqueeze(-1)
    return out, kept + (key * until_end(decay)).transpose(2, 3) @ value
