"""The memory plan of a run, made from the model's config: it needs no weights and no GPU."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from onboard.cache.budget import CUDA_RESERVE, CachePlan, MemoryPlan
from onboard.cache.cached_sequence import CachedSequenceInterface
from onboard.cache.examples import set_decode_example, set_prefill_example
from onboard.config import OWN_HEADS, RuntimeConfig
from onboard.content import content_path
from onboard.errors import OnboardError
from onboard.graph.assembly.assemble import pipeline_for
from onboard.graph.cache_init.interface import cache_plan, cache_share
from onboard.graph.compile.capture import capture_sizes
from onboard.graph.context import TransformContext
from onboard.graph.export.counted_experts import few_experts
from onboard.graph.export.layer_kinds import Repeated, UnlikeError
from onboard.graph.export.left_out import Occurrences, restore_experts
from onboard.graph.factory import read_config
from onboard.graph.fx import graph_modules
from onboard.graph.peak import peak_bytes
from onboard.graph.pipeline import Pipeline
from onboard.graph.weight_load.quantised_folder import asks_for_float8_cache
from onboard.ops import has_triton
from onboard.parallel.ranks import Ranks
from onboard.runtime.build import check_cached, make_context, resolve_dtype
from onboard.runtime.fitted_plan import fitted
from onboard.runtime.limits import ON_CPU, ON_GPU, max_positions
from onboard.sources.language_part import part_of

FEW_EXPERTS = 2
"""Experts of a mixture that are built and exported."""

_NEEDS_MEMORY = (
    "load_weights",
    "add_draft_heads",
    "initialize_cache",
    "resize_kv_cache",
    "compile_model",
)


def plan_memory(
    checkpoint: Path,
    runtime: RuntimeConfig,
    memory: int,
    *,
    gpu: bool,
    devices: int = 1,
    root: Path | None = None,
    model: str = "",
    reduced: bool = True,
) -> tuple[MemoryPlan, list[str]]:
    """Return the memory plan of a run of `checkpoint` (a folder with config.json) on `memory`
    bytes, and its facts.

    The run's own pipeline is applied to a model without weights; with `reduced`, to a few layers
    and experts of each kind, and the others are counted by these. `gpu`: the memory is a GPU's, and
    `devices` of them share the model. Default limits are lowered as a run would. A model that was
    not onboarded is planned as transformers' own module (mode "hf"), which is a fact. Raises
    `OnboardError` for a model that cannot run.
    """
    counted, facts = count_memory(
        checkpoint, runtime, gpu=gpu, root=root, model=model, reduced=reduced
    )
    plan, lowered = fitted(counted.over(devices, memory))
    return plan, [*facts, *lowered]


def count_memory(
    checkpoint: Path,
    runtime: RuntimeConfig,
    *,
    gpu: bool,
    root: Path | None = None,
    model: str = "",
    reduced: bool = True,
) -> tuple[MemoryPlan, list[str]]:
    """Return the plan of `plan_memory` before default limits are lowered to the memory."""
    runtime, facts = _planned(runtime, checkpoint, gpu=gpu, root=root)
    made = partial(_made, checkpoint, runtime, gpu=gpu, root=root, model=model)
    try:
        plan, found = made(complete=not reduced)
    except UnlikeError as error:
        plan, found = made(complete=True)
        found.append(f"every layer was planned by itself: {error}")
    if runtime.speculative.draft == OWN_HEADS:
        facts.append("the plan leaves out the checkpoint's heads that draft")
    return plan, [*facts, *found]


def _made(
    checkpoint: Path,
    runtime: RuntimeConfig,
    *,
    gpu: bool,
    root: Path | None,
    model: str,
    complete: bool,
) -> tuple[MemoryPlan, list[str]]:
    """Return the plan and its facts; unless `complete`, made from a few layers and experts of each
    kind.
    """
    context = _context(checkpoint, runtime, gpu=gpu, root=root, model=model)
    changes: dict[str, Any] = {key: {"enabled": False} for key in _NEEDS_MEMORY}
    changes["export_to_gm"] = {"complete": complete} | (
        {} if complete else {"num_moe_experts_for_export": FEW_EXPERTS}
    )
    with nullcontext() if complete else few_experts(FEW_EXPERTS):
        gm = Pipeline(pipeline_for(context, changes)).run(context)
    check_cached(gm, context)
    _count_towers(context)
    return _counted(gm, context, gpu=gpu), context.facts


def planned_context(
    checkpoint: Path, runtime: RuntimeConfig, *, gpu: bool, root: Path | None, model: str = ""
) -> TransformContext:
    """Return the context of a run on another machine, for transforms that need no weights.

    Of several ranks it is that of the first.
    """
    planned, facts = _planned(runtime, checkpoint, gpu=gpu, root=root)
    context = _context(checkpoint, planned, gpu=gpu, root=root, model=model)
    context.facts.extend(facts)
    return context


def _context(
    checkpoint: Path, runtime: RuntimeConfig, *, gpu: bool, root: Path | None, model: str
) -> TransformContext:
    alone = runtime.model_copy(update={"world_size": 1})
    defaults = ON_GPU if gpu else ON_CPU
    context = make_context(checkpoint, alone, root=root, model=model, defaults=defaults)
    if runtime.world_size > 1:
        context.ranks = Ranks(0, runtime.world_size)
        context.runtime = context.runtime.model_copy(update={"world_size": runtime.world_size})
    return context


def _planned(
    runtime: RuntimeConfig, checkpoint: Path, *, gpu: bool, root: Path | None
) -> tuple[RuntimeConfig, list[str]]:
    """Return the configuration for the pipeline on this machine, and facts about what differs from
    the planned run.
    """
    config, facts = read_config(checkpoint, root), []
    dtype = str(
        resolve_dtype(runtime.dtype, config, torch.device("cuda" if gpu else "cpu"))
    ).removeprefix("torch.")
    changes: dict[str, Any] = {"device": "cpu", "dtype": dtype}
    if gpu and runtime.attn_backend == "auto" and has_triton():
        changes["attn_backend"] = "triton"
    cache = runtime.kv_cache_config
    if gpu and cache.dtype == "auto" and dtype != "float32" and asks_for_float8_cache(checkpoint):
        changes["kv_cache_config"] = cache.model_copy(update={"dtype": "float8_e4m3fn"})
    if (
        runtime.mode == "graph"
        and not content_path("models", f"modeling_{config.model_type}.py", root=root).is_file()
    ):
        changes["mode"] = "hf"
        facts.append(
            "the model was not onboarded: this is the plan of transformers' own (--mode hf)"
        )
    if runtime.mode == "transformers":
        raise OnboardError(
            "mode transformers has no graph to plan by", hint="Plan mode graph or hf"
        )
    return runtime.model_copy(update=changes), facts


def _count_towers(context: TransformContext) -> None:
    """Note what towers take, of which several ranks have none."""
    if part_of(context.factory.checkpoint) is not None:
        context.facts.append(
            "code of the repository reads images in a process of its own, in the host's memory"
        )
    elif context.factory.towers and context.runtime.world_size == 1:
        from onboard.runtime.multimodal.tower_memory import tower_memory
        from onboard.runtime.multimodal.towers import Towers

        context.towers, facts = tower_memory(Towers(context))
        context.facts.extend(facts)


def _counted(module: nn.Module, context: TransformContext, *, gpu: bool) -> MemoryPlan:
    cache: CachedSequenceInterface = context.cache
    ((_, gm),) = graph_modules(module)
    left_out = context.left_out or Repeated(None)
    restore_experts(gm, left_out)
    times = Occurrences.beside(left_out)
    times.check(gm)
    return MemoryPlan(
        cache=_cache_plan(gm, context, times),
        parameters=sum(
            times.of_tensor(name) * each.numel() for name, each in gm.named_parameters()
        ),
        weights=sum(times.of_tensor(name) * each.nbytes for name, each in gm.named_parameters()),
        tables=sum(times.of_tensor(name) * each.nbytes for name, each in gm.named_buffers()),
        inputs=cache.info.num_bytes,
        activations=max(_prefill_bytes(gm, context), context.towers.activations),
        step_tokens=cache.info.max_num_tokens,
        graphs=_graph_bytes(gm, context) if gpu else 0,
        reserve=CUDA_RESERVE if gpu else 0,
        towers=context.towers.weights,
        memory=0,
        positions=max_positions(context.factory.text_config) or context.runtime.max_seq_len,
        fraction=cache_share(context),
        chosen=tuple(sorted(context.chosen)),
    )


def _cache_plan(gm: fx.GraphModule, context: TransformContext, times: Occurrences) -> CachePlan:
    """Return the caches of the whole model; those of layers that were left out come last."""
    plan, counts = cache_plan(context), times.of_caches(gm, context.cache)
    more = [
        resource
        for name, resource in context.cache.resources.items()
        for _ in range(counts[name] - 1)
    ]
    return replace(plan, resources=(*plan.resources, *more))


def _prefill_bytes(gm: fx.GraphModule, context: TransformContext) -> int:
    """Return the activations of the largest step, the one that `resize_kv_cache` measures on a
    GPU.
    """
    set_prefill_example(context.cache.info, context.cache.info.max_num_tokens)
    return _peak(gm, context)


def _graph_bytes(gm: fx.GraphModule, context: TransformContext) -> int:
    """Return the bytes of captured decode steps: the activations and logits of the largest, which all
    share.
    """
    runtime, cache = context.runtime, context.cache
    if runtime.compile_backend not in ("auto", "torch-cudagraph", "torch-opt"):
        return 0
    sizes = capture_sizes(runtime.cuda_graph_config.batch_sizes, runtime.max_batch_size)
    if not sizes:
        return 0
    set_decode_example(cache.info, sizes[-1])
    return _peak(gm, context)


def _peak(gm: fx.GraphModule, context: TransformContext) -> int:
    cache, meta = context.cache, torch.device("meta")
    caches = {name: resource.allocate(2, meta) for name, resource in cache.resources.items()}
    peak, closed = peak_bytes(gm, {**cache.info.args, **caches}, context.device)
    fact = f"activations leave out what these use inside: {', '.join(sorted(closed))}"
    context.facts.extend([fact] if closed and fact not in context.facts else [])
    return peak
