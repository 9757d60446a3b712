"""The delta rule, gated or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from onboard.ops.library import register_op
from onboard.ops.norm.norm import torch_l2norm
from onboard.ops.ssm.ssm import pairwise_decay, wide_dtype
from onboard.ops.written_forms import CallForm, LoopForm, logarithms

_CHUNK = 64
_L2_EPS = 1e-6
LOOP_SCALES = ("1.0", "None")
"""What loops multiply the queries by, or find multiplied: one, or the root's inverse of their size."""
_GATED_LOOPS = tuple(
    LoopForm(
        ("bshk", "bshk", "bshv", "bsh", "bsh"),
        f"torch.ops.onboard.torch_gated_delta_rule(a, b, c, {decay}, e, {scale})",
    )
    for scale in LOOP_SCALES
    for decay in logarithms("d")
)
_LOOPS = tuple(
    LoopForm(
        ("bshk", "bshk", "bshv", "bsh"),
        f"torch.ops.onboard.torch_delta_rule(a, b, c, d, {scale})",
    )
    for scale in LOOP_SCALES
)


def fake_delta_rule(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> Tensor:
    """Return an empty output of `torch_gated_delta_rule`: like v, in q's dtype."""
    return q.new_empty(v.shape)


@register_op(
    fake_delta_rule,
    carries_state=True,
    described="Gated delta rule mixer",
    called_as=CallForm(
        "torch.ops.onboard.torch_gated_delta_rule(query, key, value, g, beta, None, use_qk_l2norm_in_kernel)",
        fixed={"initial_state": None, "output_final_state": False},
        ignored=frozenset({"chunk_size"}),
        settings=({"use_qk_l2norm_in_kernel": True}, {"chunk_size": 8}),
        with_state=True,
    ),
    looped_as=_GATED_LOOPS,
    hinted=True,
)
def torch_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> Tensor:
    """Linear attention with decay and correction (Yang et al. 2024, arXiv:2412.06464).

    state <- exp(g) state; state <- state + beta k (v - k^T state)^T; out = scale q^T state. Within
    a chunk the corrections of all tokens solve one triangular system (the WY form, section 3.3
    there).

    Args:
        q, k: [batch, sequence, key_heads, key_dim]; key_heads divides value_heads, heads are
            repeated in a row.
        v: [batch, sequence, value_heads, value_dim].
        g: [batch, sequence, value_heads], logarithm of the decay, not positive.
        beta: [batch, sequence, value_heads], rate of the correction.
        scale: factor of q; None: key_dim ** -0.5.
        use_qk_l2norm_in_kernel: scale q and k to length one first (epsilon 1e-6).

    Returns:
        Like v, in q's dtype.
    """
    state = torch.zeros(
        (q.shape[0], v.shape[2], q.shape[3], v.shape[3]), dtype=wide_dtype(q), device=q.device
    )
    return delta_rule(q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, state)[0]


@register_op(
    fake_delta_rule,
    carries_state=True,
    described="Delta rule mixer",
    called_as=CallForm(
        "torch.ops.onboard.torch_delta_rule(query, key, value, beta, None, use_qk_l2norm_in_kernel)",
        fixed={"initial_state": None, "output_final_state": False},
        ignored=frozenset({"chunk_size"}),
        settings=({"use_qk_l2norm_in_kernel": True}, {"chunk_size": 8}),
        with_state=True,
    ),
    looped_as=_LOOPS,
    hinted=True,
)
def torch_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> Tensor:
    """Linear attention with correction (Yang et al. 2024, arXiv:2406.06484): the gated delta rule
    that forgets nothing.

    state <- state + beta k (v - k^T state)^T; out = scale q^T state.

    Args:
        q, k, v, beta, scale, use_qk_l2norm_in_kernel: as in `torch_gated_delta_rule`.

    Returns:
        Like v, in q's dtype.
    """
    return torch_gated_delta_rule(
        q, k, v, torch.zeros_like(beta), beta, scale, use_qk_l2norm_in_kernel
    )


def in_chunks(
    chunk: Callable[..., tuple[Tensor, Tensor]],
    size: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    use_qk_l2norm_in_kernel: bool,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run a delta rule over `size` tokens at a time; return its outputs and the state behind them.

    Args:
        chunk: query, key, value, g, beta [batch, value_heads, tokens, ...] and the state ->
            outputs, state.
        size: tokens of a chunk.
        q, k, v, g, beta, scale, use_qk_l2norm_in_kernel: as in `torch_gated_delta_rule`; g may be
            one of each channel.
        state: [batch, value_heads, key_dim, value_dim], in float32 (float64 for float64).
    """
    query, key, value, decay, rate = (
        item.to(wide_dtype(q)).transpose(1, 2) for item in (q, k, v, g, beta)
    )
    query, key = (
        item.repeat_interleave(value.shape[1] // item.shape[1], dim=1) for item in (query, key)
    )
    if use_qk_l2norm_in_kernel:
        query, key = torch_l2norm(query, _L2_EPS), torch_l2norm(key, _L2_EPS)
    query = query * (key.shape[-1] ** -0.5 if scale is None else scale)
    out = torch.empty_like(value)
    for start in range(0, value.shape[2], size):
        part = slice(start, start + size)
        out[:, :, part], state = chunk(
            *(item[:, :, part] for item in (query, key, value, decay, rate)), state
        )
    return out.transpose(1, 2).to(q.dtype).contiguous(), state


def _delta_chunk(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return a chunk's outputs [batch, heads, tokens, value_dim] and the state [.., key_dim,
    value_dim] behind it.
    """
    total = decay.cumsum(-1)
    between, reached = pairwise_decay(total), total.exp().unsqueeze(-1)
    slowed = key * rate.unsqueeze(-1)
    system = (slowed @ key.transpose(-1, -2) * between).tril(-1)
    wanted = value * rate.unsqueeze(-1) - (slowed * reached) @ state
    corrections = wanted  # the system of one token is the identity
    if key.shape[2] > 1:
        corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = (query * reached) @ state + (query @ key.transpose(-1, -2) * between) @ corrections
    left = (total[..., -1:] - total).exp().unsqueeze(-1)
    return out, state * total[..., -1].exp()[..., None, None] + (key * left).transpose(
        -1, -2
    ) @ corrections


delta_rule = partial(in_chunks, _delta_chunk, _CHUNK)
"""Return the outputs of `torch_gated_delta_rule` that follow a state, and the state behind them."""
