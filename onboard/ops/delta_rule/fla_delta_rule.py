"""The gated delta rule with flash-linear-attention's prefill: the back end "fla", where that
package is installed.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from onboard.ops.delta_rule.delta_rule import fake_delta_rule
from onboard.ops.library import register_op


def has_fla() -> bool:
    """Whether the package flash-linear-attention is installed; importing it takes many seconds."""
    return importlib.util.find_spec("fla") is not None


@register_op(fake_delta_rule, mutates=("delta_cache",))
def fla_cached_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    kv_lens: Tensor,
    state_slots: Tensor,
    batch_info_host: Tensor,
    delta_cache: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> Tensor:
    """`torch_cached_gated_delta_rule` whose prompts another library's kernels read; they wait for
    the device.

    A decode step is our own kernel: it changes states where they lie, and theirs would have them
        copied out and back.
    """
    sequences, tokens, longest_query, *_ = batch_info_host.tolist()
    if longest_query == 1:
        decode = torch.ops.onboard.triton_cached_gated_delta_rule
        spans = (cu_seqlens, kv_lens, state_slots, batch_info_host)
        return decode(q, k, v, g, beta, *spans, delta_cache, scale, use_qk_l2norm_in_kernel)  # type: ignore[no-any-return]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    starts, slots = cu_seqlens[: sequences + 1], state_slots[:sequences]
    continues = (kv_lens[:sequences] > starts.diff()).view(-1, 1, 1, 1)
    # Whatever the slot of a new sequence holds
    states = torch.where(continues, delta_cache[slots], 0.0)
    out = fake_delta_rule(q, k, v).zero_()
    out[:, :tokens], states = chunk_gated_delta_rule(
        *(each[:, :tokens] for each in (q, k, v, g, beta)),
        scale=scale,
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=starts.long(),
    )
    delta_cache.index_copy_(0, slots, states.to(delta_cache.dtype))
    return out
