"""What norms of flash_attn compute in inference, as its documentation has it: in plain torch, which
modeling code could have itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + epsilon) * weight, worked out in float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (scaled * weight).to(x.dtype)


class RMSNorm(nn.Module):
    """A root-mean-square norm with a weight."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x in the norm's scale."""
        return rms_norm(x, self.weight, self.eps)


def layer_norm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Any:
    """Return the norm of x [..., size] with the residual stream added before it; `prenorm`: and that
    sum, in float32 with `residual_in_fp32`.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide if residual is None else wide + residual
    centered = wide if is_rms_norm else wide - wide.mean(-1, keepdim=True)
    scaled = centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + eps) * weight
    out = (scaled if bias is None else scaled + bias).to(x.dtype)
    return (out, wide if residual_in_fp32 else wide.to(x.dtype)) if prenorm else out


def rms_norm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Any:
    """Return `layer_norm_fn` with a root-mean-square norm."""
    return layer_norm_fn(x, weight, bias, residual, eps, prenorm, residual_in_fp32, True)


FORMS: dict[str, Any] = {
    "flash_attn..rms_norm": rms_norm,
    "flash_attn..RMSNorm": RMSNorm,
    "flash_attn..layer_norm_fn": layer_norm_fn,
    "flash_attn..rms_norm_fn": rms_norm_fn,
}
"""Package and name -> what it computes; the modules between them differ from version to version."""
