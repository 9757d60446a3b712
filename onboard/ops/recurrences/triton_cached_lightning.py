"""Lightning attention with a cache of each sequence's state, by the kernels of Mamba 2: keys stand
for its B, queries for its C, values for its hidden states, and time goes on steadily.
"""

from __future__ import annotations

from torch import Tensor

from onboard.ops.library import register_op
from onboard.ops.recurrences.lightning import fake_lightning_attention
from onboard.ops.ssm.triton_cached_ssm import prepared, scan
from onboard.ops.triton.launch import require_device


@register_op(fake_lightning_attention, mutates=("lightning_cache",))
def triton_cached_lightning_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    lightning_cache: Tensor,
) -> Tensor:
    """`torch_cached_lightning_attention` as kernels; inputs of 16 bits are multiplied as these."""
    require_device(q)
    slopes = slopes.contiguous()
    row = (v, slopes, k, q, slopes, slopes.expand(v.shape[:3]), slopes)
    metadata = (cu_seqlens, kv_lens, state_slots, batch_info_host)
    call = prepared(row, metadata, lightning_cache, q.dtype, steady=True)
    return scan(call, [1.0, 1.0], batch_info_host)
