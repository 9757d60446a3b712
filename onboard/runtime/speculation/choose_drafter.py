"""The drafter that a configuration asks for, and which models can have one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from onboard.config import OWN_HEADS, RuntimeConfig
from onboard.errors import UsageError
from onboard.graph.context import TransformContext
from onboard.runtime.engine import Engine
from onboard.runtime.length_dependent_rope import length_dependent_rope
from onboard.runtime.resolve import find_checkpoint, resolve_config
from onboard.runtime.speculation.draft_model import ModelDrafter
from onboard.runtime.speculation.drafter import Drafter
from onboard.runtime.speculation.head_drafter import HeadDrafter
from onboard.runtime.speculation.ngram import NgramDrafter

NGRAM = "ngram"
_SHARE = 0.1
"""Of a GPU's free memory, for the caches of a draft model."""

Build = Callable[[Path, RuntimeConfig, Path | None, str], Engine]
"""(checkpoint, configuration, root, name) -> the engine of a draft model."""


def drafter_of(runtime: RuntimeConfig, root: Path | None, build: Build) -> Drafter | None:
    """Return the drafter of a run, None for none, and for the checkpoint's own heads, which come
    with its graph (`own_heads`); a draft model is built, before the model itself takes what memory
    is free.

    Raises `UsageError` for a draft model that cannot take drafts back, and for settings that the
    drafts do not go with.
    """
    wanted = runtime.speculative
    if not wanted.draft:
        return None
    if runtime.world_size > 1:
        raise UsageError("drafts are for one device", hint="Set world_size to 1, or leave them out")
    if wanted.draft == OWN_HEADS:
        _check_own_heads(runtime)
        return None
    if wanted.draft == NGRAM:
        return NgramDrafter(wanted.num_tokens)
    folder = Path.cwd() if root is None else root
    own = resolve_config(wanted.draft, folder, None, _like(runtime))
    engine = build(find_checkpoint(own), own, root, wanted.draft)
    if engine.rope is not None or engine.cache.has_states or engine.codebooks.count > 1:
        raise UsageError(
            f"the draft model {wanted.draft} {_WHY}", hint=f"Use another one, or {NGRAM}"
        )
    return ModelDrafter(engine, wanted.num_tokens)


def _check_own_heads(runtime: RuntimeConfig) -> None:
    """Raise `UsageError` for a run that the checkpoint's heads cannot draft for."""
    wrong = {
        f"mode {runtime.mode}": runtime.mode != "graph",
        "adapters": bool(runtime.lora),
    }
    if found := next((what for what, holds in wrong.items() if holds), None):
        raise UsageError(
            f"the checkpoint's own heads do not draft with {found}", hint=f"Use {NGRAM} to draft"
        )


def own_heads(context: TransformContext) -> HeadDrafter | None:
    """Return the drafter of the heads that came with the graph, None without any; a fact says how
    many tokens a draft has, where that are fewer than asked for.
    """
    if not context.draft_heads:
        return None
    wanted = context.runtime.speculative.num_tokens
    drafter = HeadDrafter(context.draft_heads, context.cache, wanted)
    if drafter.most < wanted:
        context.facts.append(f"drafts have {drafter.most} tokens: each head predicts one of them")
    return drafter


_WHY = "cannot take tokens back: it has recurrent states, several codebooks, or rotary tables by length"


def _like(runtime: RuntimeConfig) -> dict[str, object]:
    """Return the settings that a draft model has from the model itself."""
    names = ("device", "dtype", "max_batch_size", "max_seq_len", "attn_backend")
    cache = {"free_gpu_memory_fraction": _SHARE, "enable_block_reuse": False}
    return {name: getattr(runtime, name) for name in names} | {"kv_cache_config": cache}


def check_drafts(context: TransformContext) -> None:
    """Raise `UsageError` for a model whose steps cannot check drafts; a fact says how they run."""
    if not context.runtime.speculative.draft:
        return
    rope = length_dependent_rope(context.factory.text_config.to_dict())
    cache = context.cache
    if context.codebooks.count > 1 or rope is not None or cache is None:
        raise UsageError(
            "the model cannot take tokens back: it has several codebooks, or rotary tables by length",
            hint="Leave the drafts out",
        )
    if context.device.type == "cuda" and not cache.info.captured_drafts:
        context.facts.append("drafts: steps that check some run without a CUDA graph")


def check_vocabularies(engine: Engine) -> None:
    """Raise `UsageError` where a draft model's tokens stand for other texts than the model's."""
    drafter = engine.drafter
    if not isinstance(drafter, ModelDrafter):
        return
    own, other = (
        None if each.tokenizer is None else each.tokenizer.vocabulary()
        for each in (engine, drafter.engine)
    )
    if own is not None and other is not None and own != other:
        raise UsageError(
            "the draft model has another vocabulary than the model",
            hint=f"Use a model of the same tokenizer, or {NGRAM}",
        )
