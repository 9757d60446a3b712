"""What functions of mamba_ssm and causal_conv1d compute in inference, as their references have it:
token by token, in plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_PLAIN = (0.0, float("inf"))


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: torch.Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """Return the convolution of each channel of x [batch, channels, sequence] with weight
    [channels, width], which sees no later inputs.
    """
    _refuse(seq_idx=seq_idx)
    width, channels = weight.shape[1], x.shape[1]
    before = x.new_zeros((*x.shape[:2], width - 1)) if initial_states is None else initial_states
    whole = torch.cat((before, x), dim=-1)
    out = nn.functional.conv1d(whole, weight.unsqueeze(1), bias, groups=channels)
    out = nn.functional.silu(out) if activation in ("silu", "swish") else out
    return (out, whole[..., whole.shape[-1] - width + 1 :]) if return_final_states else out


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return the convolution's next output for x [batch, channels], or [batch, channels, tokens];
    `conv_state` [batch, channels, width] takes the new inputs.
    """
    tokens = x.unsqueeze(-1) if x.dim() == 2 else x
    whole = torch.cat((conv_state, tokens), dim=-1)
    conv_state.copy_(whole[..., -conv_state.shape[-1] :])
    seen = whole[..., whole.shape[-1] - tokens.shape[-1] - weight.shape[1] + 1 :]
    out = nn.functional.conv1d(seen, weight.unsqueeze(1), bias, groups=x.shape[1])
    out = nn.functional.silu(out) if activation in ("silu", "swish") else out
    return out.squeeze(-1) if x.dim() == 2 else out


def selective_scan_fn(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """Return Mamba's scan of u [batch, channels, sequence] (arXiv:2312.00752, section 3).

    delta is like u; A [channels, state]; B, C [batch, state, sequence]; D, delta_bias [channels].
    """
    step = delta if delta_bias is None else delta + delta_bias[:, None]
    step = nn.functional.softplus(step) if delta_softplus else step
    state, outs = u.new_zeros((*u.shape[:2], A.shape[1])), []
    for i in range(u.shape[2]):
        decay = torch.exp(step[:, :, i, None] * A)
        state = decay * state + step[:, :, i, None] * B[:, None, :, i] * u[:, :, i, None]
        outs.append((state * C[:, None, :, i]).sum(dim=-1))
    out = torch.stack(outs, dim=2)
    out = out if D is None else out + u * D[:, None]
    out = (out if z is None else out * nn.functional.silu(z)).to(u.dtype)
    return (out, state) if return_last_state else out


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _PLAIN,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Any:
    """Return Mamba 2's scan of x [batch, sequence, heads, size] (arXiv:2405.21060, section 6).

    dt [batch, sequence, heads]; A, D, dt_bias [heads]; B, C [batch, sequence, groups, state].
    """
    _refuse(
        seq_idx=seq_idx, cu_seqlens=cu_seqlens, return_varlen_states=return_varlen_states or None
    )
    step = dt if dt_bias is None else dt + dt_bias
    step = nn.functional.softplus(step) if dt_softplus else step
    step = step.clamp(*dt_limit)
    B, C = (item.repeat_interleave(x.shape[2] // item.shape[2], dim=2) for item in (B, C))
    start = x.new_zeros((x.shape[0], *x.shape[2:], B.shape[-1]))
    state, outs = start if initial_states is None else initial_states, []
    for i in range(x.shape[1]):
        now = step[:, i, :, None, None]
        state = torch.exp(now * A[:, None, None]) * state
        state = state + now * x[:, i, :, :, None] * B[:, i, :, None, :]
        outs.append((state * C[:, i, :, None, :]).sum(dim=-1))
    out = torch.stack(outs, dim=1)
    if D is not None:
        out = out + x * (D if D.dim() == 2 else D[:, None])
    out = (out if z is None else out * nn.functional.silu(z)).to(x.dtype)
    return (out, state) if return_final_states else out


def rmsnorm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    upcast: bool = True,
) -> torch.Tensor:
    """Return Mamba 2's norm of x [..., size] with the gate z, which is like x: the RMS norm of each
    `group_size` channels, before or after the gate's silu is multiplied by.
    """
    size = x.shape[-1] if group_size is None else group_size
    states = x.float() if upcast else x
    gate = None if z is None else nn.functional.silu(z.float() if upcast else z)
    if gate is not None and not norm_before_gate:
        states = states * gate
    groups = states.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    groups = groups * torch.rsqrt(groups.pow(2).mean(dim=-1, keepdim=True) + eps)
    states = groups.reshape(x.shape) * weight
    states = states if bias is None else states + bias
    if gate is not None and norm_before_gate:
        states = states * gate
    return states.to(x.dtype)


def _refuse(**given: Any) -> None:
    """Raise where something is given that has no form here."""
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{name} has no form here")


FORMS: dict[str, Any] = {
    "causal_conv1d..causal_conv1d_fn": causal_conv1d_fn,
    "causal_conv1d..causal_conv1d_update": causal_conv1d_update,
    "mamba_ssm..selective_scan_fn": selective_scan_fn,
    "mamba_ssm..selective_scan_ref": selective_scan_fn,
    "mamba_ssm..mamba_chunk_scan_combined": mamba_chunk_scan_combined,
    "mamba_ssm..rmsnorm_fn": rmsnorm_fn,
}
"""Package and name -> what it computes; the modules between them differ from version to version."""
