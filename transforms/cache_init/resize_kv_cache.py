"""Grow the caches to the size that the run can use and the memory allows."""

from __future__ import annotations

import torch
from torch import nn

from onboard.cache.budget import CachePlan, lowered
from onboard.cache.cached_sequence import CachedSequenceInterface
from onboard.cache.examples import set_prefill_example
from onboard.errors import OnboardError, UsageError
from onboard.gpu import gib
from onboard.graph.cache_init.interface import cache_plan, cache_share, free_memory
from onboard.graph.context import TransformContext
from onboard.graph.transform import (
    BaseTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
    skipped,
)
from onboard.parallel.ranks import least


@register_transform("resize_kv_cache")
class ResizeKVCache(BaseTransform[TransformConfig]):
    """Never larger than what `max_batch_size` sequences of `max_seq_len` tokens, or `max_tokens`,
    can fill.

    On a GPU one forward pass of `max_num_tokens` tokens shows what activations need. Towers for
    images or sound are loaded later, and read while no step runs: their weights are left free, and
    the larger one of both activations. The caches get `free_gpu_memory_fraction` of the rest. What
    that holds bounds sequences whose length nobody asked for.
    """

    acts = True

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Reallocate the caches; the graph stays as it is. Raises `OnboardError` where they have no
        room.
        """
        cache: CachedSequenceInterface | None = context.cache
        if cache is None or not (cache.resources or cache.whole):
            return gm, skipped("the graph has nothing to cache")
        plan = cache_plan(context)
        pages = _affordable_pages(gm, plan, context)
        _check_longest(plan, pages, context)
        cache.allocate(pages)
        return gm, TransformInfo(
            num_matches=len(cache.caches), is_clean=True, has_valid_shapes=True
        )


def _affordable_pages(gm: nn.Module, plan: CachePlan, context: TransformContext) -> int:
    """Return the pages that are of use, and for which there is memory beside the activations of the
    largest step.
    """
    cuda = context.device.type == "cuda"
    activations = _activation_bytes(gm, context.cache, context.device) if cuda else 0
    activations = max(activations, context.towers.activations)
    free = free_memory(context.device) - context.towers.weights
    held = sum(cache.nbytes for cache in context.cache.caches.values())
    own = plan.pages_within(cache_share(context) * (free + held - activations))
    pages = least(own, context.ranks)  # one schedule serves all ranks
    if pages < 2:
        raise OnboardError(
            f"no memory is left for the cache: {free / 2**30:.2f} GiB free, a step needs {activations / 2**30:.2f}",
            hint="Lower max_num_tokens, or use a larger GPU" if cuda else "Lower max_batch_size",
        )
    return pages


def _check_longest(plan: CachePlan, pages: int, context: TransformContext) -> None:
    """Say that no sequence can be as long as it may; raise `UsageError` where memory lacks for a
    length asked for.

    The engine bounds sequences by the pages; graph and inputs stay those of the model's length.
    """
    own, longest, size = plan.limits.max_seq_len, plan.longest(pages), gib(plan.num_bytes(pages))
    if longest >= own:
        return
    if "max_seq_len" in context.chosen:
        context.facts.append(lowered("max_seq_len", own, longest, f"what a cache of {size} holds"))
    elif plan.limits.max_tokens is not None and "max_tokens" not in context.chosen:
        context.facts.append(f"the cache holds {longest} tokens, less than max_seq_len={own}")
    else:
        raise UsageError(
            f"max_seq_len is {own:,} and a cache of {size}, all there is, holds {longest:,} tokens",
            hint=f"Lower it to {longest}",
        )


@torch.inference_mode()
def _activation_bytes(gm: nn.Module, cache: CachedSequenceInterface, device: torch.device) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    set_prefill_example(cache.info, cache.info.max_num_tokens)
    cache.call(gm)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
