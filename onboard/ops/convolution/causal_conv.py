"""The short causal convolution in front of a recurrent mixer."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from onboard.ops.library import register_op
from onboard.ops.linear.activation import activation_function
from onboard.ops.written_forms import CallForm


def fake_conv(input: Tensor, weight: Tensor, *_: object, **__: object) -> Tensor:
    """Return an empty output of `torch_causal_conv1d`: [batch, sequence, out_channels]."""
    return input.new_empty((*input.shape[:2], weight.shape[0]))


def padding_of(weight: Tensor, dilation: int) -> int:
    """Return how many earlier inputs an output sees, by a weight [out_channels, channels // groups,
    kernel].
    """
    return dilation * (weight.shape[-1] - 1)


def groups_of(input: Tensor, weight: Tensor) -> int:
    """Return the groups of channels of an input [..., channels], by the same weight."""
    return input.shape[-1] // weight.shape[1]


@register_op(
    fake_conv,
    carries_state=True,
    described="Short convolution mixer, [batch, seq, hidden] to the same.",
    called_as=CallForm(
        "torch.ops.onboard.torch_causal_conv1d(hidden_states, weight.unsqueeze(1), bias, activation=activation)",
        turned=frozenset({"hidden_states"}),
        settings=({"activation": None}, {"activation": "silu"}, {"activation": "gelu"}),
    ),
    hinted=True,
)
def torch_causal_conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int = 1,
    padding: int | None = None,
    dilation: int = 1,
    groups: int | None = None,
    padding_mode: str = "zeros",
    activation: str | None = None,
) -> Tensor:
    """`torch.nn.Conv1d` along the sequence, cut to its length, and an activation: output i sees
    inputs up to i.

    Args:
        input: [batch, sequence, channels].
        weight: [out_channels, channels // groups, kernel].
        bias: [out_channels] or None.
        stride, dilation: as in `nn.Conv1d`; the stride has to be 1.
        padding: dilation * (kernel - 1), on both sides; what the right side adds is cut off. None:
            that.
        groups: as in `nn.Conv1d`. None: as many as the weight has.
        padding_mode: "zeros".
        activation: a key of `onboard.ops.linear.activation.ACTIVATIONS`, or None.

    Returns:
        [batch, sequence, out_channels] in the input's dtype.

    Raises:
        ValueError: the convolution is not causal, or pads with something else than zeros.
        UsageError: unknown activation.
    """
    reach = padding_of(weight, dilation)
    if stride != 1 or padding not in (None, reach) or padding_mode != "zeros":
        raise ValueError(
            f"torch_causal_conv1d: stride {stride}, padding {padding}, {padding_mode!r} is not causal; "
            "use stride 1, padding dilation * (kernel - 1), 'zeros'"
        )
    length = input.shape[1]
    groups = groups_of(input, weight) if groups is None else groups
    channels_first = F.conv1d(
        input.transpose(1, 2).to(weight.dtype), weight, bias, 1, reach, dilation, groups
    )
    out = channels_first[..., :length].transpose(1, 2)
    if activation is not None:
        out = activation_function(activation)(out)
    return out.to(input.dtype).contiguous()
