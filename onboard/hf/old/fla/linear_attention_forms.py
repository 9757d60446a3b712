"""What functions and modules of flash-linear-attention (`fla`) compute in inference, as its
documentation has it: token by token, in plain torch. Shapes are those of tokens before heads; those
of heads before tokens (`head_first`) have the two axes exchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onboard.hf.old.attention_forms import get_unpad_data, index_first_axis, pad_input
from onboard.hf.old.fla import rwkv7_forms
from onboard.hf.old.fla.each_text import each_text, start, wide
from onboard.hf.old.fla.kda_gates import fused_kda_gate
from onboard.hf.old.layers.norm_forms import rms_norm
from onboard.hf.old.recurrent_forms import causal_conv1d_fn

_LENGTH = 1e-6
"""What is added to the square of the length of queries and keys."""


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return linear attention with decay and correction (arXiv:2412.06464), and its state.

    q, k [batch, sequence, key heads, key size]; v [batch, sequence, heads, value size]; g, the
    logarithm of the decay, and beta [batch, sequence, heads].
    """
    texts = cu_seqlens, head_first
    settings = scale, initial_state, use_qk_l2norm_in_kernel
    tensors = q, k, v, g.unsqueeze(-1), beta
    return each_text(_corrected, tensors, settings, output_final_state, texts, kwargs)


def chunk_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `chunk_gated_delta_rule` that forgets nothing (arXiv:2406.06484)."""
    texts = cu_seqlens, head_first
    settings = scale, initial_state, use_qk_l2norm_in_kernel
    tensors = q, k, v, torch.zeros_like(beta).unsqueeze(-1), beta
    return each_text(_corrected, tensors, settings, output_final_state, texts, kwargs)


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_gate_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `chunk_gated_delta_rule` with a decay of each channel, g [batch, sequence, heads, key
    size] (Kimi delta attention), or made of gates g by `fused_kda_gate` (`use_gate_in_kernel`).
    """
    if use_gate_in_kernel:
        assert A_log is not None
        g = fused_kda_gate(g, A_log, dt_bias=dt_bias)
    texts = cu_seqlens, False  # since before heads could come first
    settings = scale, initial_state, use_qk_l2norm_in_kernel
    tensors = q, k, v, g, beta
    return each_text(_corrected, tensors, settings, output_final_state, texts, kwargs)


def _corrected(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None,
    initial_state: torch.Tensor | None,
    normed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of a delta rule with decays g [batch, sequence, heads, key size or 1], and
    its state [batch, heads, key size, value size].
    """
    groups = v.shape[2] // k.shape[2]
    queries, keys = (wide(item).repeat_interleave(groups, dim=2) for item in (q, k))
    if normed:
        queries, keys = (
            item * torch.rsqrt(item.square().sum(-1, keepdim=True) + _LENGTH)
            for item in (queries, keys)
        )
    queries = queries * (q.shape[-1] ** -0.5 if scale is None else scale)
    state, outs = start(keys, v, initial_state), []
    for i in range(v.shape[1]):
        state = state * wide(g)[:, i].exp().unsqueeze(-1)
        known = (state * keys[:, i].unsqueeze(-1)).sum(dim=2)
        change = wide(beta)[:, i].unsqueeze(-1) * (wide(v)[:, i] - known)
        state = state + keys[:, i].unsqueeze(-1) * change.unsqueeze(2)
        outs.append((state * queries[:, i].unsqueeze(-1)).sum(dim=2))
    return torch.stack(outs, dim=1).to(q.dtype), state


def chunk_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    *,
    g_gamma: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return linear attention of q, k, v [batch, sequence, heads, size] with a decay of each head,
    and its state: g [batch, sequence, heads] and g_gamma [heads] are logarithms.

    Raises:
        NotImplementedError: g_gamma where heads come first, which is older.
    """
    if g_gamma is not None and head_first:
        raise NotImplementedError("g_gamma where heads come first: no form here")
    texts = cu_seqlens, head_first if g_gamma is None else False
    decay = torch.zeros(q.shape[:3], device=q.device) if g is None else g
    decay = decay if g_gamma is None else decay + g_gamma
    tensors, settings = (q, k, v, decay), (scale, initial_state)
    return each_text(_decaying, tensors, settings, output_final_state, texts, kwargs)


def _decaying(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    scale: float | None,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of linear attention with decays g, and its state."""
    queries = wide(q) * (q.shape[-1] ** -0.5 if scale is None else scale)
    state, outs = start(k, v, initial_state), []
    for i in range(v.shape[1]):
        state = state * wide(g)[:, i, :, None, None].exp()
        state = state + wide(k)[:, i].unsqueeze(-1) * wide(v)[:, i].unsqueeze(2)
        outs.append((state * queries[:, i].unsqueeze(-1)).sum(dim=2))
    return torch.stack(outs, dim=1).to(q.dtype), state


def chunk_rwkv6(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return linear attention of r, k, v [batch, sequence, heads, size] with decays of each channel,
    whose logarithms are w, and the weight u [heads, size] of the token itself (arXiv:2404.05892);
    and its state.
    """
    texts, settings = (cu_seqlens, head_first), (u, scale, initial_state)
    return each_text(_channelwise, (r, k, v, w), settings, output_final_state, texts, kwargs)


def chunk_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return linear attention of q, k, v [batch, sequence, heads, size] with decays of each channel,
    whose logarithms are g (arXiv:2312.06635), and its state.
    """
    texts, settings = (cu_seqlens, head_first), (None, scale, initial_state)
    return each_text(_channelwise, (q, k, v, g), settings, output_final_state, texts, kwargs)


def fused_recurrent_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gk: torch.Tensor,
    gv: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    head_first: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `chunk_gla`, whose decays are `gk`; those of values have no form here."""
    settings = scale, initial_state, output_final_state, cu_seqlens, head_first
    return chunk_gla(q, k, v, gk, *settings, gv=gv, **kwargs)


def _channelwise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    first: torch.Tensor | None,
    scale: float | None,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of linear attention with decays g of each channel, and its state; with
    `first` a token is read in that weight, before the state has it.
    """
    queries = wide(q) * (q.shape[-1] ** -0.5 if scale is None else scale)
    state, outs = start(k, v, initial_state), []
    for i in range(v.shape[1]):
        added = wide(k)[:, i].unsqueeze(-1) * wide(v)[:, i].unsqueeze(2)
        read = None if first is None else state + wide(first).unsqueeze(-1) * added
        state = state * wide(g)[:, i].exp().unsqueeze(-1) + added
        outs.append(((state if read is None else read) * queries[:, i].unsqueeze(-1)).sum(dim=2))
    return torch.stack(outs, dim=1).to(q.dtype), state


class ShortConvolution(nn.Conv1d):
    """A convolution of each channel of [batch, sequence, channels] that sees no later inputs."""

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        **_: Any,
    ) -> None:
        super().__init__(
            hidden_size,
            hidden_size,
            kernel_size,
            groups=hidden_size,
            padding=kernel_size - 1,
            bias=bias,
        )
        self.activation = activation

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        cache: torch.Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the outputs, like x, and no state: there is no generation here."""
        if residual is not None or mask is not None or cache is not None:
            raise NotImplementedError("a short convolution with residual, mask or cache")
        if cu_seqlens is not None:
            texts = x.tensor_split(cu_seqlens[1:-1].cpu(), dim=1)
            return torch.cat([self.forward(text)[0] for text in texts], dim=1), None
        weight = self.weight.squeeze(1)
        turned = causal_conv1d_fn(x.transpose(1, 2), weight, self.bias, activation=self.activation)
        return turned.transpose(1, 2), None


class FusedRMSNormGated(nn.Module):
    """A root-mean-square norm whose result a gate is multiplied to."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        **_: Any,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.activation = activation
        self.weight = nn.Parameter(torch.ones(hidden_size)) if elementwise_affine else None

    def forward(self, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """Return the norm of x times the gate g, both [..., size]."""
        return rms_norm_gated(x, g, self.weight, None, self.activation, eps=self.eps)


class RMSNorm(nn.Module):
    """A root-mean-square norm."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if bias or not elementwise_affine:
            raise NotImplementedError("an RMSNorm with a bias, or without a weight")
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return x, to which the residual is added, in the norm's scale; `prenorm`: and the sum."""
        if residual_in_fp32:
            raise NotImplementedError("an RMSNorm whose residual is in float32 by itself")
        if residual is not None:
            x = x + residual
        normed = rms_norm(x, self.weight, self.eps)
        return (normed, x) if prenorm else normed


def rms_norm_gated(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str = "swish",
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Return the norm of x, times the sigmoid of the gate g, or its SiLU; both [..., size]."""
    if residual is not None or prenorm:
        raise NotImplementedError("a gated norm with a residual")
    inner, gate = wide(x), wide(g)
    normed = inner * torch.rsqrt(inner.pow(2).mean(-1, keepdim=True) + eps)
    normed = normed if weight is None else normed * weight
    normed = normed if bias is None else normed + bias
    factor = torch.sigmoid(gate) if activation == "sigmoid" else nn.functional.silu(gate)
    return (normed * factor).to(x.dtype)


_FUSED = {
    "chunk_gated_delta_rule": "fused_recurrent_gated_delta_rule",
    "chunk_delta_rule": "fused_recurrent_delta_rule",
    "chunk_kda": "fused_recurrent_kda",
    "chunk_simple_gla": "fused_recurrent_simple_gla",
    "chunk_rwkv6": "fused_recurrent_rwkv6",
    "chunk_gla": "fused_chunk_gla",
    "l2_norm": "l2norm",
}
"""Functions that compute the same in another way."""
_NAMED = (
    chunk_gated_delta_rule,
    chunk_delta_rule,
    chunk_kda,
    chunk_simple_gla,
    chunk_rwkv6,
    chunk_gla,
    fused_recurrent_gla,
    fused_kda_gate,
    *rwkv7_forms.FORMS,
    ShortConvolution,
    FusedRMSNormGated,
    RMSNorm,
    rms_norm_gated,
    index_first_axis,
    pad_input,
    get_unpad_data,
)
FORMS: dict[str, Any] = {"fla..ACT2FN": rwkv7_forms.ACTIVATIONS} | {
    name: form
    for form in _NAMED
    for name in (f"fla..{form.__name__}", f"fla..{_FUSED.get(form.__name__, form.__name__)}")
}
"""Package and name -> what it computes; the modules between them differ from version to version."""
