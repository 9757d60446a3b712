"""Projections and the gated feed-forward block."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from onboard.ops.library import register_op
from onboard.ops.linear.activation import activation_function


def _projected(input: Tensor, weight: Tensor, *_: object, **__: object) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


@register_op(
    _projected,
    schema=(
        '(Tensor input, Tensor weight, Tensor? bias=None, *, str tp_mode="unknown", str layer_type="unknown",'
        " int[]? output_sizes=None, int[1]? tp_min_local_shape=None) -> Tensor"
    ),
)
def torch_linear_simple(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tp_mode: str = "unknown",
    layer_type: str = "unknown",
    output_sizes: list[int] | None = None,
    tp_min_local_shape: list[int] | None = None,
) -> Tensor:
    """Affine projection as one graph node, without the views that exporting `nn.Linear` can leave
    around it. How ranks divide it changes nothing on one device.

    Args:
        input: [..., in].
        weight: [out, in].
        bias: [out] or None.
        tp_mode: "colwise": each rank has some outputs; "rowwise": each has some inputs, and the
            outputs are a sum over ranks; "none": each has all. "unknown": nothing is said.
        layer_type: the kind of layer.
        output_sizes: outputs of the blocks that are cut each by itself; None: there is one.
        tp_min_local_shape: the fewest outputs of each block (or of all alike) that a rank has:
            ranks of which there are more have the same ones. None: 1.

    Returns:
        [..., out] in the input's dtype.
    """
    return F.linear(input, weight, bias)


def _fed_forward(
    input: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    activation_function(activation)  # or raises
    return _projected(input, down_weight)


@register_op(_fed_forward, feed_forward=True)
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
