"""Builds an engine from a checkpoint and a configuration: model factory, transform pipeline,
caches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onboard.config import RuntimeConfig
from onboard.content import content_path
from onboard.errors import NoCachedFormError, OnboardError, UsageError
from onboard.graph.assembly.assemble import pipeline_for
from onboard.graph.context import TransformContext
from onboard.graph.factory import ModelFactory
from onboard.graph.graph_cache import GraphCache, cache_folder
from onboard.graph.invariants import uncached_attention
from onboard.graph.pipeline import Observer, Pipeline
from onboard.parallel.ranks import ALONE, Ranks, current_ranks
from onboard.runtime.engine import Engine
from onboard.runtime.length_dependent_rope import length_dependent_rope
from onboard.runtime.limits import ON_CPU, ON_GPU, Defaults, settled
from onboard.runtime.speculation.choose_drafter import (
    check_drafts,
    check_vocabularies,
    drafter_of,
    own_heads,
)
from onboard.runtime.tested_file import why_untested
from onboard.runtime.tokenizer import Tokenizer, tokenizer_folder
from onboard.sources.language_part import part_of
from onboard.untrusted.bounds import read_json
from onboard.untrusted.consent import NO_CONSENT, Consent

if TYPE_CHECKING:
    from onboard.runtime.multimodal.own_towers import OwnTowers
    from onboard.runtime.multimodal.towers import Towers

log = logging.getLogger("onboard.runtime")


def build_engine(
    checkpoint: Path,
    runtime: RuntimeConfig,
    *,
    root: Path | None = None,
    model: str | None = None,
    observer: Observer | None = None,
    dump_dir: Path | None = None,
    strict: bool = False,
    consent: Consent = NO_CONSENT,
) -> Engine:
    """Build the model's cached graph, its caches and the engine around them.

    Args:
        checkpoint: folder with config.json and (unless `skip_loading_weights`) safetensors.
        runtime: the configuration of the run.
        root: folder in which the generated model file is looked up first.
        model: the model's name as the user wrote it, for messages.
        observer: called after each transform.
        dump_dir: folder for dumps of the graph after each transform.
        strict: raise an error for a fallback, or for a model file whose tests did not pass.
        consent: what may be run of a repository's code, to read images.

    Raises:
        OnboardError: the model was not onboarded, or its memory does not suffice.
        UsageError: the configuration does not fit the model or the machine.
    """
    with _enough_memory():
        context = make_context(checkpoint, runtime, root=root, model=model)
        context.consent = consent
        return _built(context, root, model or str(checkpoint), observer, dump_dir, strict)


@contextmanager
def _enough_memory() -> Iterator[None]:
    """Turn a failed allocation of host memory into an `OnboardError` that says so."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise OnboardError(
            f"the host's memory does not hold this run ({' '.join(str(error).split())[:200]})",
            hint="Lower max_batch_size, max_num_tokens or max_seq_len",
        ) from error


def _built(
    context: TransformContext,
    root: Path | None,
    model: str,
    observer: Observer | None,
    dump_dir: Path | None,
    strict: bool,
) -> Engine:
    runtime = context.runtime
    drafter = drafter_of(runtime, root, _build_drafting)
    if strict:
        _check_tested(context, _onboard_command(root, model))
    _check_adapters(context)
    _check_stages(context)
    towers = _towers(context) if _takes_more(context) else None
    pipeline = Pipeline(
        pipeline_for(context), dump_dir=dump_dir, strict=strict, cache=_graph_cache(context)
    )
    if runtime.mode == "graph":
        gm = pipeline.run(context, observer)
        check_cached(gm, context)
    else:
        gm = _run_checked(pipeline, context, observer)
    if runtime.batch_invariant:
        _check_invariant(context)
    check_drafts(context)
    if towers is not None:
        towers.share(gm)
    engine = Engine(
        gm,
        context.cache,
        **({} if context.ranks.follows else _text_ends(context.factory.checkpoint, context)),
        towers=towers,
        rope=length_dependent_rope(context.factory.text_config.to_dict()),
        adapters=tuple(context.runtime.lora),
        reuse=context.runtime.kv_cache_config.enable_block_reuse,
        overlap=_overlaps(context.runtime, context.device),
        history=context.history,
        facts=context.facts,
        drafter=drafter or own_heads(context),
        bytes_read=context.bytes_read,
    )
    check_vocabularies(engine)
    return engine


def _build_drafting(
    checkpoint: Path, runtime: RuntimeConfig, root: Path | None, name: str
) -> Engine:
    return build_engine(checkpoint, runtime, root=root, model=name)


def _check_adapters(context: TransformContext) -> None:
    """Raise `UsageError` for a run that may not have adapters."""
    if context.runtime.lora and context.runtime.mode != "graph":
        raise UsageError("adapters need mode graph", hint="Leave --mode out, or merge the adapter")


def _check_stages(context: TransformContext) -> None:
    """Raise `UsageError` for pipeline stages whose last one would not choose for all."""
    ranks = context.ranks
    if context.runtime.dist_mapping.pp > 1 and not ranks.is_alone and not ranks.led:
        raise UsageError(
            "pipeline stages need a first rank that leads the others",
            hint="Load the model by LLM, with world_size",
        )


def _takes_more(context: TransformContext) -> bool:
    """Whether prompts may have more than text, whose towers one device has."""
    if context.factory.eager_modules and not _has_towers(context):
        context.facts.append(
            "code of the repository reads images, which has no part in this: prompts are text alone"
        )
    if not _has_towers(context) or context.runtime.batch_invariant:
        return False
    if context.ranks.led:
        context.facts.append("several ranks: prompts are text alone, towers run on one device")
    return not context.ranks.led


def _has_towers(context: TransformContext) -> bool:
    return bool(context.factory.towers) or _has_own_towers(context)


def _has_own_towers(context: TransformContext) -> bool:
    """Whether the model is the language part of one whose towers are code of its repository."""
    return context.runtime.mode == "graph" and part_of(context.factory.checkpoint) is not None


def _text_ends(checkpoint: Path, context: TransformContext) -> dict[str, Any]:
    """Return the engine's tokenizer, end-of-text tokens and vocabulary size; a model with several
    codebooks has the last alone.
    """
    codebooks, config = context.codebooks, context.factory.text_config
    if codebooks.count == 1:
        ends, size = eos_token_ids(checkpoint, config), getattr(config, "vocab_size", None)
        tokenizer = Tokenizer.load(tokenizer_folder(context.runtime.tokenizer, checkpoint))
        context.facts.extend([tokenizer.note] if tokenizer and tokenizer.note else [])
        return {"tokenizer": tokenizer, "eos_token_ids": ends, "vocab_size": size}
    context.facts.append(
        f"a token is a code of each of {codebooks.count} codebooks: there is no text, outputs end by max_tokens or"
        " stop_token_ids alone, and torch's operators choose the codes"
    )
    return {"vocab_size": codebooks.tokens}


def _overlaps(runtime: RuntimeConfig, device: torch.device) -> bool:
    return device.type == "cuda" if runtime.overlap is None else runtime.overlap


def _run_checked(
    pipeline: Pipeline, context: TransformContext, observer: Observer | None
) -> nn.Module:
    """Run the pipeline on transformers' own module, and compare the result with that module."""
    from onboard.runtime.mode_notes import (
        mode_notes,  # what these import takes seconds, which a generated model need not wait
    )
    from onboard.verify.self_check import SelfCheck

    check = SelfCheck(context, observer)
    gm = pipeline.run(context, check.observe)
    check_cached(gm, context)
    check.run(gm)
    context.facts.extend(mode_notes(gm, context))
    return gm


def _graph_cache(context: TransformContext) -> GraphCache | None:
    """Return the graph cache, None if graphs are not kept; a multimodal model's graph is not, since
    its towers need what only the export knows.
    """
    folder, adapters = cache_folder(), context.runtime.lora
    if folder is None or context.factory.mode != "graph" or context.factory.eager_modules:
        return None
    if context.consent.code and _has_own_towers(context):
        return None
    if adapters:  # their matrices are in the graph
        return None
    return GraphCache(folder)


def _towers(context: TransformContext) -> Towers | OwnTowers:
    """Return what reads images and sound; caches leave it the memory that it will take."""
    from onboard.runtime.multimodal.own_towers import OwnTowers
    from onboard.runtime.multimodal.tower_memory import kept_tower_memory
    from onboard.runtime.multimodal.towers import Towers

    if _has_own_towers(context):
        return OwnTowers(context)
    towers = Towers(context)
    if context.device.type == "cuda":  # caches on the host leave most of it free
        context.towers, facts = kept_tower_memory(towers)
        context.facts.extend(facts)
    return towers


def check_cached(gm: nn.Module, context: TransformContext) -> None:
    """Raise `OnboardError` if an attention op has no KV cache, or the model has no cache at all."""
    graph = context.factory.mode == "graph"
    written_out = (
        "Its own code is not recognised: onboard the model, which translates it; where that is"
        " refused, too, nothing here runs it yet"
    )
    if left := uncached_attention(gm):
        raise OnboardError(
            f"{len(left)} attention calls have no cache, for example {left[0].name}",
            hint="Leave the transforms that match attention and insert_cached_attention enabled"
            if graph
            else written_out,
        )
    if context.cache is None or not (context.cache.resources or context.cache.whole):
        if graph:
            raise _no_cache(context)
        raise OnboardError(
            "no attention of the model goes through transformers' interface", hint=written_out
        )


def _check_invariant(context: TransformContext) -> None:
    """Raise `UsageError` if no transform made the graph batch-invariant; prompts with images are
    left out, which is a fact.
    """
    if not any(
        entry.key == "make_batch_invariant" and entry.num_matches for entry in context.history
    ):
        raise UsageError(
            f"batch_invariant is set, and nothing does it in mode {context.runtime.mode}",
            hint="Use mode graph, with make_batch_invariant enabled",
        )
    if _has_towers(context):
        context.facts.append(
            "batch_invariant: prompts are text alone, towers may round differently"
        )


def _no_cache(context: TransformContext) -> OnboardError:
    if any(entry.key == "insert_cached_attention" and entry.enabled for entry in context.history):
        return NoCachedFormError(
            "nothing that the model keeps from token to token has a cached form"
        )
    return OnboardError("the pipeline made no cache", hint="Leave insert_cached_attention enabled")


def make_context(
    checkpoint: Path,
    runtime: RuntimeConfig,
    *,
    root: Path | None = None,
    model: str | None = None,
    defaults: Defaults | None = None,
) -> TransformContext:
    """Return the context of a pipeline run, with device, dtype and limits settled; the generated
    model file is known to exist.

    `defaults` are the limits that the configuration leaves out; None: those of the device. A
    configuration that asks for more devices than this process's group has ranks gets one, which is
    a fact.
    """
    ranks, facts = _ranks(runtime)
    runtime = runtime.model_copy(update={"world_size": ranks.world_size})
    device = resolve_device(runtime.device)
    factory = ModelFactory(
        checkpoint,
        root=root,
        dtype=torch.float32,
        model_kwargs=runtime.model_kwargs,
        mode=runtime.mode,
    )
    factory.dtype = resolve_dtype(runtime.dtype, factory.config, device)
    if runtime.mode == "graph":
        _check_onboarded(factory.config.model_type, root, model or str(checkpoint))
        if (fact := why_untested(factory.model_file(), root)) is not None:
            log.warning(fact)
            facts.append(fact)
    defaults = defaults or (ON_GPU if device.type == "cuda" else ON_CPU)
    settled_runtime, chosen = settled(
        runtime, factory.text_config, factory.first_position, defaults
    )
    return TransformContext(
        factory=factory,
        runtime=settled_runtime,
        chosen=chosen,
        device=device,
        dtype=factory.dtype,
        ranks=replace(ranks, ahead=_overlaps(runtime, device)) if ranks.led else ranks,
        first_position=factory.first_position,
        codebooks=factory.codebooks,
        facts=facts,
    )


def _ranks(runtime: RuntimeConfig) -> tuple[Ranks, list[str]]:
    """Return this process among those of the run, and a fact where it is alone and should not be."""
    if runtime.world_size == 1:
        return ALONE, []
    ranks = current_ranks()
    if ranks.world_size == runtime.world_size:
        return ranks, []
    if ranks.is_alone:
        return ALONE, [too_few(1, runtime.world_size)]
    raise UsageError(
        f"world_size is {runtime.world_size} in a group of {ranks.world_size} processes",
        hint=f"Set world_size to {ranks.world_size}",
    )


def too_few(count: int, world_size: int) -> str:
    """Return the text of a fact: a run has fewer devices than its configuration asks for."""
    devices = "one device" if count == 1 else f"{count} devices"
    return f"runs on {devices}; the config's world_size is {world_size}"


def resolve_device(name: str) -> torch.device:
    """Return the device for "auto", "cpu" or "cuda"; raise `UsageError` for "cuda" without a
    GPU.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UsageError("device is cuda and there is no GPU here", hint="Use cpu or auto")
    if name == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    """Return the run's dtype; "auto" is the checkpoint's on a GPU (bfloat16 if its config names
    none) and float32 on the CPU.
    """
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cpu":
        return torch.float32
    own = getattr(config, "dtype", None)
    return own if isinstance(own, torch.dtype) else torch.bfloat16


def eos_token_ids(checkpoint: Path, config: Any) -> frozenset[int]:
    """Return the end-of-text tokens: those of generation_config.json, else of the config.

    Raises `OnboardError` if generation_config.json is damaged.
    """
    path = checkpoint / "generation_config.json"
    generation = _read_json(path) if path.is_file() else {}
    ids = generation.get("eos_token_id")
    ids = getattr(config, "eos_token_id", None) if ids is None else ids
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(type(each) is int for each in ids):
        raise OnboardError(
            f"{path} has eos_token_id {ids}", hint="It is a token id or a list of token ids"
        )
    return frozenset(ids)


def _read_json(path: Path) -> dict[str, Any]:
    values = read_json(path)
    if not isinstance(values, dict):
        raise OnboardError(f"{path} holds no JSON object", hint="Fetch the checkpoint again")
    return values


def _check_onboarded(model_type: str, root: Path | None, model: str) -> None:
    if not content_path("models", f"modeling_{model_type}.py", root=root).is_file():
        raise UsageError(
            f"{model} ({model_type}) was not onboarded",
            hint=f"Run: {_onboard_command(root, model)}",
        )


def _check_tested(context: TransformContext, command: str) -> None:
    """Raise `OnboardError` if the generated model file is not the one whose tests passed."""
    factory = context.factory
    if (
        factory.mode == "graph"
        and (fact := why_untested(factory.model_file(), factory.root)) is not None
    ):
        raise OnboardError(f"strict: {fact}", hint=f"Run: {command}")


def _onboard_command(root: Path | None, model: str) -> str:
    return f"onboard {model}" + (f" --root {root}" if root is not None else "")
