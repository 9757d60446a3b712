"""Normalisations over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from onboard.ops.library import register_op


def fake_rmsnorm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return what `torch_rmsnorm` gives."""
    return torch.empty_like(input, dtype=torch.promote_types(input.dtype, weight.dtype))


@register_op(fake_rmsnorm, described="Root-mean-square norm over the last dimension.")
def torch_rmsnorm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467).

    Statistics in float32; the normalised value is cast to the input's dtype before it meets the
    weight, so a float32 weight on a bfloat16 input gives float32 (type promotion, as in Hugging
    Face).

    Args:
        input: [..., size].
        weight: [size].
        eps: added to the mean square.

    Returns:
        [..., size] in the promoted dtype of input and weight.
    """
    if input.dtype == weight.dtype == torch.float32:
        return F.rms_norm(input, input.shape[-1:], weight, eps)
    x = input.float()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed.to(input.dtype) * weight


@register_op()
def torch_l2norm(input: Tensor, eps: float) -> Tensor:
    """Scale vectors to length one: x / sqrt(sum(x^2) + eps), in float32.

    The *sum* of squares, as for the queries and keys of a delta rule; with the mean of squares it
    would be `torch_rmsnorm` with a weight of ones.

    Args:
        input: [..., size].
        eps: added to the sum of squares.

    Returns:
        [..., size] in the input's dtype.
    """
    x = input.float()
    return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)).to(input.dtype)


@register_op(described="Layer norm over the last dimension.")
def torch_layernorm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Layer normalisation (Ba et al. 2016, arXiv:1607.06450): all in float32, rounded once at the
    end.

    Args:
        input: [..., size].
        weight: [size], or None for ones.
        bias: [size], or None for zeros.
        eps: added to the variance.

    Returns:
        [..., size] in the input's dtype.
    """
    scale = None if weight is None else weight.float()
    shift = None if bias is None else bias.float()
    return F.layer_norm(input.float(), [input.shape[-1]], scale, shift, eps).to(input.dtype)
