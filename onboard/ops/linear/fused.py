"""References of the fused ops that post-load transforms put in; the Triton ones have the same
signatures.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from onboard.ops.library import register_op
from onboard.ops.linear.activation import activation_function
from onboard.ops.norm.norm import fake_rmsnorm, torch_rmsnorm


def _fake_fused_add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return fake_rmsnorm(total if dtype is None else total.to(dtype), weight, eps), total


@register_op(_fake_fused_add_rmsnorm, inserted=True, adds_residual=True)
def torch_fused_add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Residual addition and RMSNorm, with or without a cast between them.

    Args:
        x, residual: [..., size].
        weight: [size].
        eps: added to the mean square.
        dtype: what the sum is cast to before it is normalised; None: it is not.

    Returns:
        The normalised sum (dtype as `torch_rmsnorm`) and the sum as it is before the cast, in the
        promoted dtype of x and residual, to which it is rounded first.
    """
    total = x + residual
    return torch_rmsnorm(total if dtype is None else total.to(dtype), weight, eps), total


def _fake_silu_and_mul(x: Tensor, activation: str = "silu") -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@register_op(_fake_silu_and_mul, inserted=True)
def torch_silu_and_mul(x: Tensor, activation: str = "silu") -> Tensor:
    """act(gate) * up, where gate is the first half of the last dimension and up the second.

    Args:
        x: [..., 2 * size].
        activation: a key of `onboard.ops.linear.activation.ACTIVATIONS`.

    Returns:
        [..., size] in x's dtype.
    """
    gate, up = x.chunk(2, dim=-1)
    return activation_function(activation)(gate) * up


def _fake_fused_swiglu_mlp(
    input: Tensor, gate_up_weight: Tensor, down_weight: Tensor, *_: object, **__: object
) -> Tensor:
    return input.new_empty((*input.shape[:-1], down_weight.shape[0]))


@register_op(_fake_fused_swiglu_mlp, inserted=True, feed_forward=True)
def torch_fused_swiglu_mlp(
    input: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """`torch_swiglu_mlp` with the gate and up projections as one matrix.

    Args:
        input: [..., hidden].
        gate_up_weight: [2 * intermediate, hidden], gate rows first.
        down_weight: [hidden, intermediate].
        gate_up_bias: [2 * intermediate] or None.
        down_bias: [hidden] or None.
        activation: a key of `onboard.ops.linear.activation.ACTIVATIONS`.

    Returns:
        [..., hidden] in the input's dtype.
    """
    gate_up = F.linear(input, gate_up_weight, gate_up_bias)
    return F.linear(torch_silu_and_mul(gate_up, activation), down_weight, down_bias)


def fake_fused_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
) -> Tensor:
    """Return an empty output of `torch_fused_linear`."""
    return input.new_empty(
        (*input.shape[:-1], weight.shape[0] // 2 if activation else weight.shape[0])
    )


@register_op(fake_fused_linear, inserted=True)
def torch_fused_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
) -> Tensor:
    """A linear layer with what stands around it in a decoder: RMSNorm before, gate and residual
    addition after it.

    Args:
        input: [..., in].
        weight: [out, in], or [2 * out, in] with an activation, gate rows first.
        bias: [rows of weight] or None.
        residual: [..., out] or None; added last.
        norm_weight: [in] or None; of an RMSNorm of the input.
        eps: added to its mean square.
        activation: a key of `ACTIVATIONS`, for act(first half) * second half; "" for none.

    Returns:
        [..., out] in the input's dtype.
    """
    x = input if norm_weight is None else torch_rmsnorm(input, norm_weight, eps)
    y = F.linear(x, weight, bias)
    y = torch_silu_and_mul(y, activation) if activation else y
    return y if residual is None else y + residual
