"""Projections and the gated feed-forward block."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from onboard.ops.library import register_op
from onboard.ops.linear.activation import activation_function


@register_op()
def torch_linear_simple(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Affine projection as one graph node, without the views that exporting `nn.Linear` can leave
    around it.

    Args:
        input: [..., in].
        weight: [out, in].
        bias: [out] or None.

    Returns:
        [..., out] in the input's dtype.
    """
    return F.linear(input, weight, bias)


@register_op(feed_forward=True)
def torch_swiglu_mlp(
    input: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """Gated feed-forward block (Shazeer 2020, arXiv:2002.05202): down(act(gate(x)) * up(x)).

    Args:
        input: [..., hidden].
        gate_weight, up_weight: [intermediate, hidden].
        down_weight: [hidden, intermediate].
        gate_bias, up_bias: [intermediate] or None.
        down_bias: [hidden] or None.
        activation: a key of `onboard.ops.linear.activation.ACTIVATIONS`.

    Returns:
        [..., hidden] in the input's dtype.

    Raises:
        UsageError: unknown activation.
    """
    gate = activation_function(activation)(F.linear(input, gate_weight, gate_bias))
    return F.linear(gate * F.linear(input, up_weight, up_bias), down_weight, down_bias)
