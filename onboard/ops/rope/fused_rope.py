"""References of the rotations in layout bsnd that `optimize_rope` puts in; the Triton ones have the
same signatures.
"""

from __future__ import annotations

from torch import Tensor

from onboard.ops.library import register_op
from onboard.ops.norm.norm import torch_rmsnorm
from onboard.ops.rope.rope import (
    torch_rope_with_complex_freqs,
    torch_rope_with_explicit_cos_sin,
    torch_rope_with_qk_interleaving,
)


@register_op(inserted=True, rotary=("cos", "sin"), row_wise=True)
def torch_rope_cached(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Half rotation of q and k in layout bsnd.

    Args:
        q, k: [batch, sequence, heads, head_dim]; the numbers of heads may differ.
        cos, sin: [batch, sequence, size], size <= head_dim.

    Returns:
        q and k rotated, shapes and dtypes unchanged.
    """
    return torch_rope_with_explicit_cos_sin(q, k, cos, sin, 2)


@register_op(inserted=True, rotary=("cos", "sin"))
def torch_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """RMSNorm of each head of q and k, then half rotation, in layout bsnd.

    Args:
        q, k: [batch, sequence, heads, head_dim]; the numbers of heads may differ.
        q_weight, k_weight: [head_dim].
        eps: added to the mean square.
        cos, sin: [batch, sequence, size], size <= head_dim.

    Returns:
        q and k normalised and rotated, shapes unchanged, in the promoted dtype of heads and
        weights.
    """
    return torch_rope_cached(
        torch_rmsnorm(q, q_weight, eps), torch_rmsnorm(k, k_weight, eps), cos, sin
    )


@register_op(inserted=True, rotary=("cos", "sin"))
def torch_rope_deinterleaved(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """`torch_rope_with_qk_interleaving` in layout bsnd: half rotation of channels that lie in
    pairs.

    Args:
        q, k: [batch, sequence, heads, head_dim]; the numbers of heads may differ.
        cos, sin: [batch, sequence, size], size <= head_dim.

    Returns:
        q and k rotated, their first `size` channels de-interleaved, shapes and dtypes unchanged.
    """
    return torch_rope_with_qk_interleaving(q, k, cos, sin, 2)


@register_op(inserted=True, rotary=("freqs_cis",))
def torch_rope_pairs(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """`torch_rope_with_complex_freqs` in layout bsnd: rotation of pairs of neighbouring channels,
    in float32.

    Args:
        q, k: [batch, sequence, heads, head_dim]; the numbers of heads may differ.
        freqs_cis: [batch, sequence, size / 2] complex64, cos + i sin; size <= head_dim.

    Returns:
        q and k rotated, shapes and dtypes unchanged.
    """
    return torch_rope_with_complex_freqs(q, k, freqs_cis, 2)
