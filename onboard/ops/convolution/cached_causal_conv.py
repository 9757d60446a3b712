"""The short causal convolution with a cache of each sequence's last inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.convolution.causal_conv import fake_conv, padding_of, torch_causal_conv1d
from onboard.ops.library import State, register_op
from onboard.ops.recurrences.advance import advance


def _state(input: Tensor, weight: Tensor, dilation: int, **_: object) -> State:
    return (padding_of(weight, dilation), input.shape[-1]), input.dtype


@register_op(fake_conv, mutates=("conv_cache",), cached_form_of="torch_causal_conv1d", state=_state)
def torch_cached_causal_conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    conv_cache: Tensor,
    dilation: int = 1,
    groups: int = 1,
    activation: str | None = None,
) -> Tensor:
    """`torch_causal_conv1d` of a flat row of tokens.

    Args:
        input: [1, tokens, channels].
        weight, bias, dilation, groups, activation: as in `torch_causal_conv1d`.
        cu_seqlens, kv_lens, state_slots, batch_info_host: as in
            `onboard.ops.recurrences.advance.advance`.
        conv_cache: [slots, dilation * (kernel - 1), channels], each sequence's last inputs; written
            to.

    Returns:
        [1, tokens, out_channels]; zeros for tokens beyond the last sequence.
    """
    padding = conv_cache.shape[1]

    def step(state: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat([state.to(new.dtype), new], dim=1)
        outputs = torch_causal_conv1d(
            seen, weight, bias, 1, padding, dilation, groups, "zeros", activation
        )
        return outputs[:, padding:], seen[:, seen.shape[1] - padding :]

    out = fake_conv(input, weight).zero_()
    return advance(
        step, [input], out, cu_seqlens, kv_lens, state_slots, batch_info_host, conv_cache
    )
