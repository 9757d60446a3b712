"""Attention of whole prompts to themselves: their keys lie side by side, so the library's kernels
can read them.

On a GPU of compute capability 9.0 they are ahead of what reads pages by a factor of two (one prompt
of 2048 tokens, 32 heads on 8 of 128 channels: cuDNN 101 us, FlashAttention 181, pages 308). cuDNN
builds a plan for each new shape, which takes some 40 ms, so it gets prompts of one length alone, and
those lengths of which there are few; the others go to FlashAttention, all prompts of a step at once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

PLANNED_LENGTHS = 256
"""cuDNN is asked for multiples of it."""
_WHOLE = 4
"""The entry of `batch_info_host` that says whether all sequences begin with the step."""
_FLASH_HEAD_DIM = 256
_CUDNN_HEAD_DIM = 128


def takes_whole_prompts(
    query: Tensor, key: Tensor, value: Tensor, cache: Tensor, batch_info_host: Tensor
) -> bool:
    """Whether a step is one of whole prompts, of dtypes and sizes for which the library gives what
    pages would give.
    """
    dim = query.shape[-1]
    return (
        query.is_cuda
        and len(batch_info_host) > _WHOLE
        and bool(batch_info_host[_WHOLE])
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.dtype == key.dtype == value.dtype == cache.dtype
        and value.shape[-1] == dim <= _FLASH_HEAD_DIM
        and dim % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def attend_whole_prompts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    batch_info_host: Tensor,
    scale: float | None,
) -> Tensor:
    """Return causal attention of prompts that lie one after the other, like `query`; zeros behind
    the last one.

    `query`, `key` and `value` are [tokens, heads, head_dim], the rest as for a cached attention.
    """
    sequences, real, longest, *_ = batch_info_host.tolist()
    q, k, v = query[:real], key[:real], value[:real]
    equal = sequences * longest == real and longest % PLANNED_LENGTHS == 0
    if equal and query.shape[-1] <= _CUDNN_HEAD_DIM:
        mixed = _planned(q, k, v, sequences, scale)
    else:
        starts = cu_seqlens[: sequences + 1]
        mixed = torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, longest, longest, 0.0, True, False, scale=scale
        )[0]
    return (
        F.pad(mixed, (0, 0, 0, 0, 0, len(query) - real))
        if real < len(query)
        else mixed.contiguous()
    )


def _planned(
    query: Tensor, key: Tensor, value: Tensor, prompts: int, scale: float | None
) -> Tensor:
    """Return the attention of prompts of one length by cuDNN, which has a plan for that."""
    q, k, v = (
        each.view(prompts, -1, *each.shape[1:]).transpose(1, 2) for each in (query, key, value)
    )
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=True
        )
    return mixed.transpose(1, 2).flatten(0, 1)
