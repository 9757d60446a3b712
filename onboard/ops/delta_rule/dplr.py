"""Linear attention whose state turns by a diagonal plus a matrix of rank one: the delta rule whose
keys that take away differ from those that add (RWKV-7, Peng et al. 2025, arXiv:2503.14456).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onboard.ops.delta_rule.cached_delta_rule import delta_state
from onboard.ops.delta_rule.delta_rule import fake_delta_rule
from onboard.ops.delta_rule.dplr_calls import CALLS
from onboard.ops.library import register_op
from onboard.ops.recurrences.advance import advance
from onboard.ops.recurrences.channel_decays import moved, until, until_end
from onboard.ops.ssm.ssm import wide_dtype

_CHUNK = 16
"""Tokens at a time; their decay between each other, channel by channel, is [chunk, chunk, key_dim]
numbers a head.
"""


@register_op(
    fake_delta_rule,
    carries_state=True,
    described="Delta rule mixer that takes away by keys of its own",
    called_as=CALLS,
    hinted=True,
)
def torch_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Linear attention with a decay of each channel and a correction of rank one (equation 16 of
    Peng et al. 2025, arXiv:2503.14456; there a is minus a key of length one, and b that key times a
    rate of each channel).

    state <- diag(exp(g)) state + b (a^T state) + k v^T; out = scale q^T state. Within a chunk what all
    tokens read of the state, a^T state, solves one triangular system.

    Args:
        q, k, a, b: [batch, sequence, heads, key_dim].
        v: [batch, sequence, heads, value_dim].
        g: [batch, sequence, heads, key_dim], logarithm of the decay, not positive.
        scale: factor of q; None: key_dim ** -0.5.

    Returns:
        Like v, in q's dtype.
    """
    state = torch.zeros(
        (q.shape[0], *q.shape[2:], v.shape[3]), dtype=wide_dtype(q), device=q.device
    )
    return _dplr_delta_rule([q, k, v, a, b, g], scale, state)[0]


@register_op(
    fake_delta_rule,
    mutates=("dplr_cache",),
    cached_form_of="torch_dplr_delta_rule",
    state=delta_state,
)
def torch_cached_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    dplr_cache: Tensor,
    scale: float | None = None,
) -> Tensor:
    """`torch_dplr_delta_rule` of a flat row of tokens.

    Args:
        q, k, v, a, b, g, scale: as in `torch_dplr_delta_rule`, with a batch of one row.
        cu_seqlens, kv_lens, state_slots, batch_info_host: as in
            `onboard.ops.recurrences.advance.advance`.
        dplr_cache: [slots, heads, key_dim, value_dim], in the recurrence's own dtype; written to.

    Returns:
        Like v, in q's dtype; zeros for tokens beyond the last sequence.
    """

    def step(state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return _dplr_delta_rule(inputs, scale, state)

    out = fake_delta_rule(q, k, v).zero_()
    inputs = [q, k, v, a, b, g]
    return advance(step, inputs, out, cu_seqlens, kv_lens, state_slots, batch_info_host, dplr_cache)


def _dplr_delta_rule(
    inputs: Sequence[Tensor], scale: float | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs that follow a state [batch, heads, key_dim, value_dim], and the state
    behind them; `inputs` are q, k, v, a, b and g.
    """
    query, *others = (item.to(state.dtype).transpose(1, 2) for item in inputs)
    query = query * (query.shape[-1] ** -0.5 if scale is None else scale)
    out = torch.empty_like(others[1], memory_format=torch.contiguous_format)
    for start in range(0, out.shape[2], _CHUNK):
        part = slice(start, start + _CHUNK)
        out[:, :, part], state = _chunk([item[:, :, part] for item in (query, *others)], state)
    return out.transpose(1, 2).to(inputs[0].dtype).contiguous(), state


def _chunk(inputs: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Return a chunk's outputs [batch, heads, tokens, value_dim] and the state behind it."""
    query, key, value, taking, giving, decay = inputs
    total, earlier = decay.cumsum(2).exp(), moved(decay, 1)
    found = until(earlier, 1)  # a token reads the state before it forgets, and adds to it
    read = (taking * earlier.cumsum(2).exp()) @ state + _weights(taking, key, found, -1) @ value
    if key.shape[2] > 1:  # the system of one token is the identity
        system = -_weights(taking, giving, found, -1)
        read = torch.linalg.solve_triangular(system, read, upper=False, unitriangular=True)
    found = until(decay, 0)
    out = (query * total) @ state + _weights(query, key, found, 0) @ value
    out = out + _weights(query, giving, found, 0) @ read
    left = until_end(decay)
    added = (key * left).transpose(2, 3) @ value + (giving * left).transpose(2, 3) @ read
    return out, state * total[:, :, -1].unsqueeze(-1) + added


def _weights(one: Tensor, other: Tensor, between: Tensor, diagonal: int) -> Tensor:
    """Return [batch, heads, tokens, tokens], products of each token with those up to it, decayed."""
    return torch.einsum("bhic,bhjc,bhijc->bhij", one, other, between).tril(diagonal)
