"""Grow the caches to the size that the run can use and the memory allows."""

from __future__ import annotations

import torch
from torch import nn

from onboard.cache.budget import CachePlan
from onboard.cache.cached_sequence import CachedSequenceInterface
from onboard.errors import OnboardError
from onboard.graph.cache_init.interface import cache_plan
from onboard.graph.context import TransformContext
from onboard.graph.transform import BaseTransform, TransformConfig, TransformInfo, register_transform


@register_transform("resize_kv_cache")
class ResizeKVCache(BaseTransform[TransformConfig]):
    """Never larger than what `max_batch_size` sequences of `max_seq_len` tokens, or `max_tokens`, can fill.

    On a GPU one forward pass of `max_num_tokens` tokens shows what activations need; the caches get
    `free_gpu_memory_fraction` of the rest.
    """

    acts = True

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Reallocate the caches; the graph stays as it is."""
        cache: CachedSequenceInterface | None = context.cache
        if cache is None or not cache.resources:
            return gm, TransformInfo(skipped=True, is_clean=True, has_valid_shapes=True)
        plan = cache_plan(context)
        pages = plan.limits.useful_pages
        if context.device.type == "cuda":
            pages = min(pages, _affordable_pages(gm, plan, context))
        if pages - 1 < cache.info.pages_per_sequence:
            tokens = (pages - 1) * cache.info.page_size
            context.facts.append(f"the cache holds {tokens} tokens, less than max_seq_len={cache.info.max_seq_len}")
        cache.allocate(pages)
        return gm, TransformInfo(num_matches=len(cache.caches), is_clean=True, has_valid_shapes=True)


def _affordable_pages(gm: nn.Module, plan: CachePlan, context: TransformContext) -> int:
    """Return the pages for which the GPU has memory beside the activations of the largest step."""
    activations = _activation_bytes(gm, context.cache, context.device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(context.device)
    held = sum(cache.nbytes for cache in context.cache.caches.values())
    pages = plan.pages_within(context.runtime.kv_cache_config.free_gpu_memory_fraction * (free + held - activations))
    if pages < 2:
        raise OnboardError(
            f"no GPU memory is left for the cache: {free / 2**30:.2f} GiB free, a step needs {activations / 2**30:.2f}",
            hint="Lower max_num_tokens, or use a larger GPU",
        )
    return pages


@torch.inference_mode()
def _activation_bytes(gm: nn.Module, cache: CachedSequenceInterface, device: torch.device) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    cache.info.set_prefill_example(cache.info.max_num_tokens)
    cache.call(gm)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
