"""The token shift of RWKV: every token sees the one before it."""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.library import State, register_op
from onboard.ops.recurrences.advance import advance


def fake_token_shift(x: Tensor, *_: object) -> Tensor:
    """Return an empty output, without gaps."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@register_op(fake_token_shift, carries_state=True)
def torch_token_shift(x: Tensor) -> Tensor:
    """Return of each token the one before it, zeros of the first (Peng et al. 2023, "RWKV",
    arXiv:2305.13048).

    Args:
        x: [batch, sequence, channels].

    Returns:
        Like x.
    """
    return _token_shift(torch.zeros_like(x[:, 0]), x)[0]


def _state(x: Tensor, **_: object) -> State:
    return (x.shape[2],), x.dtype


@register_op(
    fake_token_shift, mutates=("shift_cache",), cached_form_of="torch_token_shift", state=_state
)
def torch_cached_token_shift(
    x: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    shift_cache: Tensor,
) -> Tensor:
    """`torch_token_shift` of a flat row of tokens.

    Args:
        x: [1, tokens, channels].
        cu_seqlens, kv_lens, state_slots, batch_info_host: as in
            `onboard.ops.recurrences.advance.advance`.
        shift_cache: [slots, channels], each sequence's last token; written to.

    Returns:
        Like x; zeros for tokens beyond the last sequence.
    """
    out = fake_token_shift(x).zero_()
    return advance(
        _token_shift, [x], out, cu_seqlens, kv_lens, state_slots, batch_info_host, shift_cache
    )


def _token_shift(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what comes before each token when `state` [batch, channels] comes before the first,
    and the last one.
    """
    return torch.cat([state.to(x.dtype).unsqueeze(1), x[:, :-1]], dim=1), x[:, -1]
