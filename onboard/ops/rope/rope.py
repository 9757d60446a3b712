"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) in the forms that checkpoints use.

All forms rotate the first channels of a head, as many as the table covers, and pass the rest
(partial rotary).
"""

from __future__ import annotations

import torch
from torch import Tensor

from onboard.errors import OnboardError
from onboard.ops.library import register_op


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _deinterleave(x: Tensor) -> Tensor:
    """Move even channels to the front and odd ones behind them."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)


def _rotate_leading(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first `cos.shape[-1]` channels of x; cos and sin broadcast against x."""
    size = cos.shape[-1]
    head = x if size == x.shape[-1] else x[..., :size]
    head = _deinterleave(head) if interleaved else head
    rotated = head * cos.to(x.dtype) + _rotate_half(head) * sin.to(x.dtype)
    return rotated if size == x.shape[-1] else torch.cat((rotated, x[..., size:]), dim=-1)


def _rotate_pairs(x: Tensor, freqs: Tensor) -> Tensor:
    """Multiply neighbouring channels, taken as complex numbers, by freqs; float32 inside."""
    size = 2 * freqs.shape[-1]
    pairs = torch.view_as_complex(x[..., :size].float().reshape(*x.shape[:-1], -1, 2))
    rotated = torch.view_as_real(pairs * freqs).flatten(-2)
    return torch.cat((rotated.to(x.dtype), x[..., size:]), dim=-1)


def complex_freqs(cos: Tensor, sin: Tensor) -> Tensor:
    """Return the `freqs_cis` [..., size / 2] of tables [..., size] that hold each frequency twice.

    The two of a frequency lie side by side or half a table apart; the tables themselves tell which.
    """
    once = slice(None, None, 2) if side_by_side(cos, sin) else slice(cos.shape[-1] // 2)
    return torch.complex(cos[..., once].float(), sin[..., once].float())


def side_by_side(*tables: Tensor) -> bool:
    """Whether tables [..., size] hold each frequency in two neighbouring columns."""
    return all(torch.equal(table[..., ::2], table[..., 1::2]) for table in tables)


def _fake_rotated(x: Tensor, size: int) -> Tensor:
    """Whole heads keep the order of their strides; a part of each and its rest are put together
    anew.
    """
    return torch.empty_like(x) if size == x.shape[-1] else x.new_empty(x.shape)


def _check_table(size: int, *heads: Tensor) -> None:
    """Raise `OnboardError` for a table that turns more channels than heads have: nothing else sees
    that before a model runs.
    """
    if size > (fewest := min(x.shape[-1] for x in heads)):
        raise OnboardError(
            f"rotary positions turn {size} numbers of a head, and heads have {fewest}",
            hint="Compare the sizes in config.json with those of the released model",
        )


def fake_rope(q: Tensor, k: Tensor, cos: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    """Return what half rotation gives."""
    _check_table(cos.shape[-1], q, k)
    return _fake_rotated(q, cos.shape[-1]), _fake_rotated(k, cos.shape[-1])


def fake_moved_rope(
    q: Tensor, k: Tensor, table: Tensor, *_: object, **__: object
) -> tuple[Tensor, Tensor]:
    """Return what rotations give that move channels."""
    _check_table(table.shape[-1] * (2 if table.is_complex() else 1), q, k)
    return q.new_empty(q.shape), k.new_empty(k.shape)


@register_op(fake_rope, rotary=("cos", "sin"), row_wise=True, fused_form="rope_cached")
def torch_rope_with_explicit_cos_sin(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Half rotation: channel i turns with channel i + size/2.

    Args:
        q, k: [batch, heads, sequence, head_dim] for unsqueeze_dim 1, [batch, sequence, heads,
            head_dim] for 2; the numbers of heads may differ.
        cos, sin: [batch, sequence, size], size <= head_dim, both halves equal; cast to q's dtype.
        unsqueeze_dim: where cos and sin get the dimension that runs over heads.

    Returns:
        q and k rotated, shapes and dtypes unchanged.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotate_leading(q, cos, sin, False), _rotate_leading(k, cos, sin, False)


@register_op(fake_moved_rope, rotary=("freqs_cis",), row_wise=True, fused_form="rope_pairs")
def torch_rope_with_complex_freqs(
    xq: Tensor, xk: Tensor, freqs_cis: Tensor, unsqueeze_dim: int = 2
) -> tuple[Tensor, Tensor]:
    """Interleaved rotation: channel 2i turns with channel 2i + 1, in float32.

    Args:
        xq, xk: [batch, sequence, heads, head_dim] for unsqueeze_dim 2, [batch, heads, sequence,
            head_dim] for 1.
        freqs_cis: [batch, sequence, size / 2] complex64, cos + i sin.
        unsqueeze_dim: where freqs_cis gets the dimension that runs over heads.

    Returns:
        xq and xk rotated, shapes and dtypes unchanged.
    """
    freqs = freqs_cis.unsqueeze(unsqueeze_dim)
    return _rotate_pairs(xq, freqs), _rotate_pairs(xk, freqs)


@register_op(fake_moved_rope, rotary=("cos", "sin"), row_wise=True, fused_form="rope_deinterleaved")
def torch_rope_with_qk_interleaving(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """De-interleave the channels, then half rotation; the result stays de-interleaved (DeepSeek).

    The score of a rotated query and key is that of the interleaved rotation: both are permuted
        alike.

    Args:
        q, k, cos, sin, unsqueeze_dim: as in `torch_rope_with_explicit_cos_sin`.

    Returns:
        q and k rotated, shapes and dtypes unchanged.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotate_leading(q, cos, sin, True), _rotate_leading(k, cos, sin, True)
