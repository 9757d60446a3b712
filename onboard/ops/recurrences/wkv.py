"""WKV, the attention-like average of RWKV."""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.library import State, register_op
from onboard.ops.recurrences.advance import advance
from onboard.ops.ssm.ssm import wide_dtype
from onboard.ops.written_forms import CallForm


def fake_wkv(key: Tensor, *_: object) -> Tensor:
    """Return an empty output, without gaps."""
    return torch.empty_like(key, memory_format=torch.contiguous_format)


@register_op(
    fake_wkv,
    carries_state=True,
    described="WKV mixer",
    called_as=CallForm(
        "torch.ops.onboard.torch_wkv(key, value, time_decay, time_first)",
        fixed={"state": None, "return_state": False},
        with_state=True,
    ),
    hinted=True,
)
def torch_wkv(key: Tensor, value: Tensor, time_decay: Tensor, time_first: Tensor) -> Tensor:
    """Average of values, of each channel, with weights that fade (Peng et al. 2023,
    arXiv:2305.13048, equation 16).

    Of values up to the token's own: weight exp(key - (distance - 1) exp(time_decay)) before it,
    exp(key + time_first) at it.

    Args:
        key, value: [batch, sequence, channels].
        time_decay: [channels], logarithm of the rate at which weights fade.
        time_first: [channels], added to the key of the token itself.

    Returns:
        Like key.
    """
    state = torch.zeros((key.shape[0], 3, key.shape[2]), dtype=wide_dtype(key), device=key.device)
    return _wkv(key, value, time_decay, time_first, state)[0]


def _state(key: Tensor, **_: object) -> State:
    return (3, key.shape[2]), wide_dtype(key)


@register_op(fake_wkv, mutates=("wkv_cache",), cached_form_of="torch_wkv", state=_state)
def torch_cached_wkv(
    key: Tensor,
    value: Tensor,
    time_decay: Tensor,
    time_first: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    wkv_cache: Tensor,
) -> Tensor:
    """`torch_wkv` of a flat row of tokens.

    Args:
        key, value, time_decay, time_first: as in `torch_wkv`, with a batch of one row.
        cu_seqlens, kv_lens, state_slots, batch_info_host: as in
            `onboard.ops.recurrences.advance.advance`.
        wkv_cache: [slots, 3, channels], in the recurrence's own dtype: sum of weighted values, sum
            of weights, and the logarithm of the scale of both; written to.

    Returns:
        Like key; zeros for tokens beyond the last sequence.
    """

    def step(state: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return _wkv(key, value, time_decay, time_first, state)

    out = fake_wkv(key).zero_()
    return advance(
        step, [key, value], out, cu_seqlens, kv_lens, state_slots, batch_info_host, wkv_cache
    )


def _wkv(
    key: Tensor, value: Tensor, time_decay: Tensor, time_first: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs that follow a state [batch, 3, channels], and the state behind them.

    The largest exponent is kept apart, so that no power overflows (appendix D there). A state of
    zeros has seen no
    token: of one that has, the sum of weights is at least one.
    """
    wide = state.dtype
    keys, fading, first = key.to(wide), time_decay.to(wide).exp(), time_first.to(wide)
    total, weight, scale = state.unbind(1)
    scale = torch.where(weight == 0, -torch.inf, scale)
    out = torch.empty_like(keys, memory_format=torch.contiguous_format)
    for index in range(key.shape[1]):
        sums = _with(total, weight, scale, keys[:, index] + first, value[:, index])
        out[:, index] = sums[0] / sums[1]
        total, weight, scale = _with(total, weight, scale - fading, keys[:, index], value[:, index])
    return out.to(key.dtype), torch.stack([total, weight, scale], dim=1)


def _with(
    total: Tensor, weight: Tensor, scale: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return both sums, and their scale, with a value of the weight exp(key) more."""
    most = torch.maximum(scale, key)
    old, new = (scale - most).exp(), (key - most).exp()
    return old * total + new * value, old * weight + new, most
