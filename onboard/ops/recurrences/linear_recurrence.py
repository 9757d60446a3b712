"""The diagonal linear recurrence: each channel forgets at a rate of its own, which may depend on
the token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.ops.library import State, register_op
from onboard.ops.recurrences.advance import advance
from onboard.ops.ssm.ssm import wide_dtype
from onboard.ops.written_forms import LoopForm

_MIXED = (("a", "{}"), ("{} * a", "1 - {}"), ("(1 - {}) * a", "{}"))
"""What a loop adds, and what it keeps, of its variables: a decay, or shares that add up to one."""
_LOOPS = tuple(
    LoopForm(
        ("bsc", shape), f"torch.ops.onboard.torch_linear_recurrence({x}, {decay})".format(b, b)
    )
    for shape, b in (("bsc", "b"), ("c", "b.expand_as(a)"))
    for x, decay in _MIXED
)


def fake_linear_recurrence(x: Tensor, *_: object) -> Tensor:
    """Return an empty output, without gaps."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@register_op(
    fake_linear_recurrence,
    carries_state=True,
    described="Gated linear recurrence (RG-LRU)",
    looped_as=_LOOPS,
    hinted=True,
)
def torch_linear_recurrence(x: Tensor, decay: Tensor) -> Tensor:
    """The recurrence inside RG-LRU (De et al. 2024, "Griffin", arXiv:2402.19427, equation 4).

    state <- decay * state + x, and each state is an output; what gates the inputs is outside. A
    decay of zero starts anew.

    Args:
        x: [batch, sequence, channels].
        decay: like x, from zero to one.

    Returns:
        Like x.
    """
    return _linear_recurrence(x, decay, x.new_zeros((x.shape[0], x.shape[2]), dtype=wide_dtype(x)))[
        0
    ]


def _state(x: Tensor, **_: object) -> State:
    return (x.shape[2],), wide_dtype(x)


@register_op(
    fake_linear_recurrence,
    mutates=("recurrence_cache",),
    cached_form_of="torch_linear_recurrence",
    state=_state,
)
def torch_cached_linear_recurrence(
    x: Tensor,
    decay: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    recurrence_cache: Tensor,
) -> Tensor:
    """`torch_linear_recurrence` of a flat row of tokens.

    Args:
        x, decay: as in `torch_linear_recurrence`, with a batch of one row.
        cu_seqlens, kv_lens, state_slots, batch_info_host: as in
            `onboard.ops.recurrences.advance.advance`.
        recurrence_cache: [slots, channels], in the recurrence's own dtype; written to.

    Returns:
        Like x; zeros for tokens beyond the last sequence.
    """

    def step(state: Tensor, x: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        return _linear_recurrence(x, decay, state)

    out = fake_linear_recurrence(x).zero_()
    return advance(
        step, [x, decay], out, cu_seqlens, kv_lens, state_slots, batch_info_host, recurrence_cache
    )


def _linear_recurrence(x: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs that follow a state [batch, channels], and the last of them, in the
    state's dtype.

    Doubling (Hillis and Steele 1986): what reaches a token from ever more tokens before it, in
    log2(sequence) steps.
    """
    out, left = x.to(state.dtype, copy=True), decay.to(state.dtype)
    span = 1
    while span < out.shape[1]:
        out = torch.cat([out[:, :span], out[:, span:] + left[:, span:] * out[:, :-span]], dim=1)
        left = torch.cat([left[:, :span], left[:, span:] * left[:, :-span]], dim=1)
        span *= 2
    out = out + left * state.unsqueeze(1)
    return out.to(x.dtype), out[:, -1]
