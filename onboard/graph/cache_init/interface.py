"""The sequence interface of a run: made once, by the first transform that puts in a cache."""

from __future__ import annotations

from dataclasses import replace

import torch

from onboard.cache.batch import SequenceInfo
from onboard.cache.budget import HOST_SHARE, CachePlan, starting_share
from onboard.cache.cached_sequence import CachedSequenceInterface
from onboard.config import SettledConfig
from onboard.errors import UsageError
from onboard.gpu import available_memory
from onboard.graph.context import TransformContext
from onboard.graph.weight_load.quantised_folder import asks_for_float8_cache
from onboard.parallel.ranks import least


def make_interface(context: TransformContext) -> CachedSequenceInterface:
    """Return the run's sequence interface, without caches yet."""
    runtime = context.runtime
    return CachedSequenceInterface(
        SequenceInfo(
            max_batch_size=runtime.max_batch_size,
            max_seq_len=runtime.max_seq_len,
            max_num_tokens=runtime.max_num_tokens,
            page_size=runtime.kv_cache_config.tokens_per_block,
            device=context.device,
            first_position=context.first_position,
            snapshots=_snapshots(runtime),
            codebooks=context.codebooks,
            adapters=bool(runtime.lora),
        ),
        context.ranks,
        context.whole_caches,
    )


def _snapshots(runtime: SettledConfig) -> int:
    """Return the number of recurrent states that are kept for requests to come, and, where there are
    drafts, while a step checks them.
    """
    wanted = runtime.kv_cache_config.state_snapshots
    checked = runtime.max_batch_size if runtime.speculative.draft else 0
    if not runtime.kv_cache_config.enable_block_reuse:
        return checked
    return checked + (runtime.max_batch_size if wanted is None else wanted)


def cache_dtype(context: TransformContext) -> torch.dtype | None:
    """Return the dtype that the run asks of its caches, None for that of the keys and values.

    Where it asks for none, float8_e4m3fn if the checkpoint does: in 16-bit runs on a GPU that has it.
    Raises `UsageError` for one that the GPU's kernels do not have.
    """
    name = context.runtime.kv_cache_config.dtype
    if name == "auto":
        return torch.float8_e4m3fn if _has_float8_cache(context) else None
    if name == "float8_e4m3fn" and context.device.type == "cuda":
        capability = torch.cuda.get_device_capability(context.device)
        if capability < (8, 9):
            raise UsageError(
                f"a cache of {name} needs compute capability 8.9 and this GPU has {capability[0]}.{capability[1]}",
                hint="Use bfloat16",
            )
    return getattr(torch, name)  # type: ignore[no-any-return]


def state_dtype(context: TransformContext) -> torch.dtype | None:
    """Return the dtype that the run asks of states that may have fewer bits, None for their own."""
    name = context.runtime.kv_cache_config.mamba_ssm_cache_dtype
    return None if name == "auto" else getattr(torch, name)


def _has_float8_cache(context: TransformContext) -> bool:
    if context.device.type != "cuda" or context.dtype.itemsize != 2:
        return False
    if context.factory.mode != "graph" or context.runtime.skip_loading_weights:
        return False
    if not asks_for_float8_cache(context.factory.checkpoint):
        return False
    return torch.cuda.get_device_capability(context.device) >= (8, 9)


def cache_plan(context: TransformContext) -> CachePlan:
    """Return how many pages and slots the registered caches get in this run.

    Pages that take no memory, as those beside recurrent states alone, are as many as sequences can
    fill.
    """
    tokens = context.runtime.kv_cache_config.max_tokens
    if "max_tokens" in context.chosen and not context.cache.bytes_per_page:
        tokens = None
    limits = replace(context.cache.info.limits, max_tokens=tokens)
    return CachePlan(limits, tuple(context.cache.resources.values()))


def cache_share(context: TransformContext) -> float:
    """Return the share of the free memory that the caches may take."""
    return (
        HOST_SHARE
        if "max_tokens" in context.chosen
        else context.runtime.kv_cache_config.free_gpu_memory_fraction
    )


def free_memory(device: torch.device) -> int:
    """Return the bytes of a device that nobody uses."""
    if device.type != "cuda":
        return available_memory()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def fit_batch(context: TransformContext) -> None:
    """Lower a batch size that nobody asked for to what the memory has room for, before any cache is
    allocated.
    """
    if "max_batch_size" not in context.chosen:
        return
    share, why = starting_share(cache_share(context))
    free = free_memory(context.device) - context.towers.weights
    own = cache_plan(context).fitting_batch(share * free)
    batch = least(own, context.ranks)
    if batch < context.runtime.max_batch_size:
        context.lower("max_batch_size", batch, why)
        context.cache.narrow(batch, _snapshots(context.runtime))
