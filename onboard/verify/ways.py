"""Running a model at any point of the pipeline on given prompts, in every way that the runtime will
run it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from onboard.cache.batch import SequenceInfo
from onboard.cache.cached_sequence import CachedSequenceInterface, input_names
from onboard.cache.step_buffer import IntArray
from onboard.graph.context import TransformContext
from onboard.graph.fx import copy_graphs
from onboard.graph.transform import get_transform
from onboard.runtime.length_dependent_rope import LengthDependentRope

Prompt = Sequence[int]
CHUNK = 7
"""Tokens of a chunk in chunked prefill: no divisor of a page or of a power of two."""
DECODE = 8
"""Last tokens of each prompt that decoding computes one by one."""


@dataclass(frozen=True)
class Part:
    """Tokens `start` to `end` of prompt number `prompt`."""

    prompt: int
    start: int
    end: int


Plan = list[list[Part]]
"""Steps, each of which computes some parts in one forward pass."""


def plans(
    prompts: Sequence[Prompt], rope: LengthDependentRope | None = None, most: int | None = None
) -> dict[str, Plan]:
    """Return the ways to compute every token of the prompts, by name; only prompts of one rotary
    table share steps.

    In decode and batched decode a step has at most `most` tokens; None: any number.
    """
    lengths = [len(prompt) for prompt in prompts]
    tables: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        tables.setdefault(rope.table(length) if rope else 0, []).append(i)
    chunked = [
        [Part(i, start, min(start + CHUNK, length))]
        for i, length in enumerate(lengths)
        for start in range(0, length, CHUNK)
    ]
    return {
        "prefill": [[Part(i, 0, length)] for i, length in enumerate(lengths)],
        "chunked prefill": chunked,
        "decode": [
            step
            for group in tables.values()
            for i in group
            for step in _staggered([i], lengths, most)
        ],
        "batched decode": [
            step for group in tables.values() for step in _staggered(group, lengths, most)
        ],
    }


def _staggered(group: Sequence[int], lengths: Sequence[int], most: int | None) -> Plan:
    """Let each prompt join one step after the one before it, so that steps are mixed first and pure
    decode later; those that decode come first to the tokens that a step may have.
    """
    computed, steps = dict.fromkeys(group, 0), Plan()
    while any(computed[i] < lengths[i] for i in group):
        step: list[Part] = []
        room = sum(lengths) if most is None else most
        present = [i for i in group[: len(steps) + 1] if computed[i] < lengths[i]]
        for i in sorted(present, key=lambda i: computed[i] < _first_decoded(lengths[i])):
            size = min(max(_first_decoded(lengths[i]) - computed[i], 1), room)
            if size:
                step.append(Part(i, computed[i], computed[i] + size))
            computed[i], room = computed[i] + size, room - size
        steps.append(step)
    return steps


def _first_decoded(length: int) -> int:
    """Return the first of a prompt's tokens that are computed one by one."""
    return max(length - DECODE, 1)


@torch.inference_mode()
def run_plain(
    module: nn.Module, prompts: Sequence[Prompt], context: TransformContext
) -> list[torch.Tensor]:
    """Run a model without cache on each prompt; return logits [tokens, vocabulary] float32 on the
    CPU.

    Weights that are not loaded yet are loaded into a copy, by the code that will load them.
    """
    if not any(entry.key == "load_weights" and not entry.skipped for entry in context.history):
        module = _with_weights(module, context)
    logits = []
    for prompt in prompts:
        args = {
            "input_ids": torch.tensor([list(prompt)], device=context.device),
            "position_ids": torch.arange(len(prompt), device=context.device)[None]
            + context.first_position,
            "logits_gather_indices": torch.arange(len(prompt), device=context.device),
        }
        names = input_names(module) if hasattr(module, "graph") else ["input_ids", "position_ids"]
        output = module(**{name: args[name] for name in names})
        logits.append(getattr(output, "logits", output)[0].float().cpu())
    return logits


def _with_weights(module: nn.Module, context: TransformContext) -> nn.Module:
    cls = get_transform("load_weights")
    scratch = dataclasses.replace(context, facts=[], history=[])
    copy, _ = cls(cls.config_class.model_validate({"stage": "weight_load"})).apply(
        copy_graphs(module), scratch
    )
    return copy


@torch.inference_mode()
def run_plan(
    gm: nn.Module,
    cache: CachedSequenceInterface,
    prompts: Sequence[Prompt],
    plan: Plan,
    rope: LengthDependentRope | None = None,
) -> list[torch.Tensor]:
    """Run a cached graph by a plan; return each prompt's logits [tokens, vocabulary] float32 on the
    CPU.
    """
    lengths = [len(prompt) for prompt in prompts]
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    # the same prompts may have been there before, and this run is to write its own keys
    cache.forget()
    with cache.lent_pages(lengths) as pages:
        for step in plan:
            for part, logits in zip(
                step, _run_step(gm, cache, prompts, step, pages, rope), strict=True
            ):
                rows[part.prompt].append(logits)
    return [torch.cat(parts) for parts in rows]


def _run_step(
    gm: nn.Module,
    cache: CachedSequenceInterface,
    prompts: Sequence[Prompt],
    step: Sequence[Part],
    pages: IntArray,
    rope: LengthDependentRope | None,
) -> list[torch.Tensor]:
    sizes = [part.end - part.start for part in step]
    # Every row is wanted anyway, and a captured graph takes padding rows with it
    decode = max(sizes) == 1
    cache.info.set_batch(
        np.array([token for part in step for token in prompts[part.prompt][part.start : part.end]]),
        np.array([part.start for part in step]),
        np.array(sizes),
        pages[:, [part.prompt for part in step]],
        None if decode else np.arange(sum(sizes)),
        slots=np.array([part.prompt + 1 for part in step]),
        rope_length=max(rope.table(len(prompts[part.prompt])) for part in step) if rope else 0,
    )
    logits = cache.logits(gm)[: sum(sizes)].float().cpu()
    return list(torch.split(logits, sizes))


def interface_for(
    cache: CachedSequenceInterface, prompts: Sequence[Prompt]
) -> CachedSequenceInterface:
    """Return a run's caches when they hold the prompts, else temporary ones of the same kinds."""
    lengths = [len(prompt) for prompt in prompts]
    if cache.can_lend(lengths) and len(prompts) <= cache.info.max_batch_size:
        return cache
    info = cache.info
    scratch = CachedSequenceInterface(
        SequenceInfo(
            max_batch_size=max(info.max_batch_size, len(prompts)),
            max_seq_len=info.max_seq_len,
            max_num_tokens=info.max_num_tokens,
            page_size=info.page_size,
            device=info.device,
            first_position=info.first_position,
            codebooks=info.codebooks,
        )
    )
    for name, resource in cache.resources.items():
        scratch.add_cache(name, resource)
    scratch.allocate(1 + sum(-(-length // info.page_size) for length in lengths))
    return scratch
