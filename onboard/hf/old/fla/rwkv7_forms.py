"""What functions of flash-linear-attention (`fla`) compute that serve RWKV-7, token by token, in plain
torch. Shapes are those of tokens before heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from onboard.hf.old.fla.each_text import each_text, start, wide


def chunk_dplr_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    gk: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    *,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool = False,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    lower_bound: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return linear attention of q, k, v [batch, sequence, heads, size] whose state decays by gk, the
    logarithms of each channel, and turns by b a^T, both like k (arXiv:2503.14456); and its state.

    What is said of the decays (`safe_gate`, `lower_bound`) is for kernels.
    """
    texts, settings = (cu_seqlens, head_first), (scale, initial_state)
    return each_text(_turned, (q, k, v, a, b, gk), settings, output_final_state, texts, kwargs)


def fused_recurrent_dplr_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    gk: torch.Tensor,
    scale: float | None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    *,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `chunk_dplr_delta_rule`; the scale has to be said, since its default was 1 once."""
    texts, settings = (cu_seqlens, head_first), (scale, initial_state)
    return each_text(_turned, (q, k, v, a, b, gk), settings, output_final_state, texts, kwargs)


def chunk_rwkv7(
    r: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = 1.0,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    *,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool = False,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    lower_bound: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `chunk_dplr_delta_rule` of queries r and decays w."""
    texts, settings = (cu_seqlens, head_first), (scale, initial_state)
    return each_text(_turned, (r, k, v, a, b, w), settings, output_final_state, texts, kwargs)


def fused_recurrent_rwkv7(
    r: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float | None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    *,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `chunk_rwkv7`; the scale has to be said, since its default was 1 once."""
    texts, settings = (cu_seqlens, head_first), (scale, initial_state)
    return each_text(_turned, (r, k, v, a, b, w), settings, output_final_state, texts, kwargs)


def fused_mul_recurrent_rwkv7(
    r: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kk: torch.Tensor,
    a: torch.Tensor,
    scale: float | None = 1.0,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    *,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `chunk_rwkv7` that takes away by the keys kk, at the rates a, both like k."""
    texts, settings = (cu_seqlens, head_first), (scale, initial_state)
    tensors = r, k, v, -kk, kk * a, w
    return each_text(_turned, tensors, settings, output_final_state, texts, kwargs)


def _turned(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    g: torch.Tensor,
    scale: float | None,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs, and the state [batch, heads, key size, value size]."""
    queries = wide(q) * (q.shape[-1] ** -0.5 if scale is None else scale)
    state, outs = start(k, v, initial_state), []
    for i in range(v.shape[1]):
        read = (state * wide(a)[:, i].unsqueeze(-1)).sum(dim=2, keepdim=True)
        state = state * wide(g)[:, i].exp().unsqueeze(-1) + wide(b)[:, i].unsqueeze(-1) * read
        state = state + wide(k)[:, i].unsqueeze(-1) * wide(v)[:, i].unsqueeze(2)
        outs.append((state * queries[:, i].unsqueeze(-1)).sum(dim=2))
    return torch.stack(outs, dim=1).to(q.dtype), state


def fused_addcmul_rwkv7(
    hidden_states: torch.Tensor,
    delta: torch.Tensor,
    xr: torch.Tensor,
    xw: torch.Tensor,
    xk: torch.Tensor,
    xv: torch.Tensor,
    xa: torch.Tensor,
    xg: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Return hidden states [batch, sequence, size] with shares of delta, like them, added."""
    made = [torch.addcmul(hidden_states, delta, share) for share in (xr, xw, xk, xv, xa)]
    return (*made, None if xg is None else torch.addcmul(hidden_states, delta, xg))


def fused_k_rwkv7(k: torch.Tensor, a: torch.Tensor, ka: torch.Tensor) -> torch.Tensor:
    """Return keys k [batch, sequence, size] at the rates 1 + (a - 1) ka."""
    return k.addcmul(k * (a - 1), ka)


def gate_output_correction(
    o: torch.Tensor,
    r: torch.Tensor,
    k: torch.Tensor,
    r_k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
) -> torch.Tensor:
    """Return outputs o [batch, sequence, heads * size], with the token's own value added, times the
    gate g, like o; r and k are [batch, sequence, heads, size], r_k [heads, size].
    """
    return (o + ((r * k * r_k).sum(-1, keepdim=True) * v).view(o.shape)) * g


def l2_norm(
    x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return vectors x [..., size] in the length one."""
    normed = wide(x) * torch.rsqrt(wide(x).pow(2).sum(-1, keepdim=True) + eps)
    return normed.to(x.dtype if output_dtype is None else output_dtype)


def token_shift(
    x: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    cache: torch.Tensor | None = None,
    output_cache: bool = False,
) -> Any:
    """Return the token before each of x [batch, sequence, size], less the token itself; with
    `output_cache` the last token, too.
    """
    if cu_seqlens is not None or cache is not None:
        raise NotImplementedError(
            "a token shift of texts in a row, or behind a cache: no form here"
        )
    delta = nn.functional.pad(x, (0, 0, 1, -1)) - x
    return (delta, x[:, -1:]) if output_cache else delta


class LoRA(nn.Module):
    """Two linear layers, the first without a bias, with an activation between them."""

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        low_rank_dim: int,
        bias: bool = True,
        activation: str | None = "tanh",
    ) -> None:
        super().__init__()
        kinds = {None: nn.Identity, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "relu": nn.ReLU}
        self.activation = kinds[activation]()
        self.lora = nn.Sequential(
            nn.Linear(input_dim, low_rank_dim, bias=False),
            self.activation,
            nn.Linear(low_rank_dim, output_dim, bias=bias),
        )

    def set_bias_value(self, value: Any) -> None:
        """Fill the second layer's bias."""
        if self.lora[2].bias is not None:
            nn.init.zeros_(self.lora[2].bias).add_(value)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layers make of x [..., input_dim]."""
        return self.lora(x)  # type: ignore[no-any-return]


FORMS: tuple[Any, ...] = (
    chunk_dplr_delta_rule,
    fused_recurrent_dplr_delta_rule,
    chunk_rwkv7,
    fused_recurrent_rwkv7,
    fused_mul_recurrent_rwkv7,
    fused_addcmul_rwkv7,
    fused_k_rwkv7,
    gate_output_correction,
    l2_norm,
    token_shift,
    LoRA,
)
"""Functions and classes by their own names."""
_KEPT = {"relu": "relu", "sigmoid": "sigmoid", "silu": "silu", "sqrelu": "relu2", "swish": "silu"}
ACTIVATIONS = {key: ACT2FN[known] for key, known in _KEPT.items()}
"""What `fla` calls activations that transformers has."""
