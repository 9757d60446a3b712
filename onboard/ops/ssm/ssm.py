"""State space models: Mamba 2's scan, Mamba's selective scan, and the gated norm behind them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from onboard.ops.library import register_op
from onboard.ops.written_forms import CallForm, LoopForm


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a recurrence's state: float32, or float64 for float64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def fake_ssm(hidden_states: Tensor, *_: object, **__: object) -> Tensor:
    """Return an empty output of `torch_ssm`: like hidden_states, in the recurrence's dtype."""
    return hidden_states.new_empty(hidden_states.shape, dtype=wide_dtype(hidden_states))


@register_op(
    fake_ssm,
    carries_state=True,
    described="State-space mixer with one decay a head",
    called_as=CallForm(
        "torch.ops.onboard.torch_ssm(hidden_states, A, B, C, D, dt, dt_bias, dt_limit, chunk_size)",
        fixed={"dt_softplus": True, "initial_states": None, "return_final_states": False},
        settings=({"dt_limit": (0.3, 0.9)}, {"chunk_size": 5}),
    ),
    written_out_as="torch.ops.onboard.torch_ssm(x.unflatten(2, (dt.shape[2], -1)), A,"
    " B.unflatten(2, (groups, -1)), C.unflatten(2, (groups, -1)), D, dt, dt_bias, [least, most],"
    " chunk_size).flatten(2)",
    hinted=True,
)
def torch_ssm(
    hidden_states: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    time_step_limit: list[float],
    chunk_size: int,
) -> Tensor:
    """Mamba 2's scan (Dao and Gu 2024, arXiv:2405.21060, section 6).

    state <- exp(dt A) state + dt B x; y = C state + D x, with dt <- clamp(softplus(dt + dt_bias),
    *time_step_limit). Within a chunk the recurrence is a masked matrix product, from chunk to chunk
    it is carried by the state.

    Args:
        hidden_states: x, [batch, sequence, heads, head_dim].
        A: [heads], negative.
        B, C: [batch, sequence, groups, state]; groups divides heads.
        D, dt_bias: [heads].
        dt: [batch, sequence, heads].
        time_step_limit: least and largest dt.
        chunk_size: tokens of a chunk; changes rounding, nothing else.

    Returns:
        Like hidden_states, in float32 (float64 for float64).
    """
    batch, _, heads, size = hidden_states.shape
    state = torch.zeros(
        (batch, heads, size, B.shape[3]), dtype=wide_dtype(hidden_states), device=B.device
    )
    return scan_heads(hidden_states, A, B, C, D, dt, dt_bias, time_step_limit, chunk_size, state)[0]


def scan_heads(
    hidden_states: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt: Tensor,
    dt_bias: Tensor,
    time_step_limit: list[float],
    chunk_size: int,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of `torch_ssm` that follow a state [batch, heads, head_dim, state], and
    the state behind.
    """
    least, most = time_step_limit
    wide = wide_dtype(hidden_states)
    steps = F.softplus(dt + dt_bias.to(dt.dtype)).clamp(least, most).to(wide)
    x, heads = hidden_states.to(wide), hidden_states.shape[2]
    B, C = (item.to(wide).repeat_interleave(heads // item.shape[2], dim=2) for item in (B, C))
    decay, inputs = A.to(wide) * steps, x * steps.unsqueeze(-1)
    out = torch.empty_like(x)
    for start in range(0, x.shape[1], chunk_size):
        part = slice(start, start + chunk_size)
        out[:, part], state = decaying_chunk(
            inputs[:, part], decay[:, part], B[:, part], C[:, part], state
        )
    return out + D.to(wide).unsqueeze(-1) * x, state


def decaying_chunk(
    x: Tensor, decay: Tensor, B: Tensor, C: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs of a chunk that follow a state, and the state behind it.

    state <- exp(decay) state + x B^T; out = state C. All are [batch, tokens, heads, size], but
    decay [batch, tokens, heads], logarithmic, and state [batch, heads, size of x, size of B].
    """
    total = decay.cumsum(1)  # [batch, tokens, heads]
    weights = torch.einsum("blhn,bshn->bhls", C, B) * pairwise_decay(total.transpose(1, 2))
    out = torch.einsum("bhls,bshp->blhp", weights, x)
    out = out + torch.einsum("blhn,bhpn->blhp", C * total.exp().unsqueeze(-1), state)
    left = (total[:, -1:] - total).exp().unsqueeze(-1)
    added = torch.einsum("bshn,bshp->bhpn", B * left, x)
    return out, state * total[:, -1].exp()[..., None, None] + added


def pairwise_decay(total: Tensor) -> Tensor:
    """Return what is left at token l of what token s <= l brought, [..., l, s]; `total` is
    cumulative, logarithmic.
    """
    return log_pairwise_decay(total).exp()


def log_pairwise_decay(total: Tensor) -> Tensor:
    """Return the logarithm of `pairwise_decay`."""
    difference = total.unsqueeze(-1) - total.unsqueeze(-2)
    later = torch.ones(difference.shape[-2:], dtype=torch.bool, device=total.device).triu(1)
    return difference.masked_fill(later, -torch.inf)


@register_op(
    lambda hidden_states, *_, **__: torch.empty_like(
        hidden_states, memory_format=torch.contiguous_format
    ),
    carries_state=True,
    described="Selective state-space mixer",
    called_as=CallForm(
        "torch.ops.onboard.torch_selective_scan(hidden_states, dt, A, B, C, D, z, delta_bias)",
        fixed={"delta_softplus": True, "return_last_state": False},
        ignored=frozenset({"use_mambapy", "use_associative_scan"}),
        turned=frozenset({"hidden_states", "dt", "B", "C", "z"}),
        settings=({"z": None}, {"D": None}, {"delta_bias": None}),
    ),
    looped_as=(
        LoopForm(
            ("bsc", "bsc", "cn", "bsn", "bsn"),
            "torch.ops.onboard.torch_selective_scan(a, b, c, d, e)",
            softplus=1,
        ),
    ),
    hinted=True,
)
def torch_selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> Tensor:
    """Mamba's selective scan (Gu and Dao 2023, arXiv:2312.00752, section 3): every channel has
    decays of its own.

    state <- exp(dt A) state + dt B x; y = (C state + D x) * silu(z), with dt <- softplus(dt +
    dt_bias).

    Args:
        hidden_states: x, [batch, sequence, channels].
        dt: [batch, sequence, channels].
        A: [channels, state], negative.
        B, C: [batch, sequence, state].
        D: [channels] or None.
        z: the gate, [batch, sequence, channels] or None.
        dt_bias: [channels] or None.

    Returns:
        Like hidden_states.
    """
    state = torch.zeros(
        (hidden_states.shape[0], *A.shape), dtype=wide_dtype(hidden_states), device=A.device
    )
    return scan_channels(hidden_states, dt, A, B, C, D, z, dt_bias, state)[0]


def scan_channels(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of `torch_selective_scan` that follow a state [batch, channels, state],
    and that behind.
    """
    wide = wide_dtype(hidden_states)
    steps = F.softplus(dt if dt_bias is None else dt + dt_bias.to(dt.dtype)).to(wide)
    x, B, C, A = hidden_states.to(wide), B.to(wide), C.to(wide), A.to(wide)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for index in range(x.shape[1]):
        step = steps[:, index].unsqueeze(-1)
        state = (step * A).exp() * state + step * B[:, index].unsqueeze(1) * x[:, index].unsqueeze(
            -1
        )
        out[:, index] = (state @ C[:, index].unsqueeze(-1)).squeeze(-1)
    if D is not None:
        out = out + D.to(wide) * x
    if z is not None:
        out = out * F.silu(z.to(wide))
    return out.to(hidden_states.dtype), state


@register_op(
    lambda x, *_, **__: torch.empty_like(x, memory_format=torch.contiguous_format), hinted=True
)
def torch_rmsnorm_gated(
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    eps: float,
    group_size: int,
    norm_before_gate: bool = False,
) -> Tensor:
    """RMSNorm of groups of channels with a SiLU gate before or behind it (Mamba 2,
    arXiv:2405.21060, section 7).

    Statistics and gate in float32; the normalised value is cast to the input's dtype before it
    meets the weight.

    Args:
        x: [..., size].
        weight: [size].
        gate: like x, or None.
        eps: added to the mean square.
        group_size: channels that are normalised together; divides size.
        norm_before_gate: the gate multiplies the weighted, normalised value instead of the input.

    Returns:
        [..., size] in the input's dtype.
    """
    wide = wide_dtype(x)
    value = x.to(wide)
    opened = None if gate is None else F.silu(gate.to(wide))
    if opened is not None and not norm_before_gate:
        value = value * opened
    grouped = value.reshape(*x.shape[:-1], -1, group_size)
    normed = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
    out = weight * normed.to(x.dtype)
    if opened is not None and norm_before_gate:
        out = out * opened
    return out.to(x.dtype)
