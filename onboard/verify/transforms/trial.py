"""A run of the pipeline whose model computes the same random prompts after every transform; on
several ranks all of them do.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onboard.config import RuntimeConfig, SettledConfig
from onboard.graph.assembly.assemble import pipeline_for
from onboard.graph.context import HistoryEntry, TransformContext
from onboard.graph.invariants import uncached_mixers
from onboard.graph.pipeline import Observer, Pipeline
from onboard.graph.transform import BaseTransform
from onboard.hf.text_tokens import text_tokens
from onboard.parallel.ranks import least
from onboard.runtime.build import make_context
from onboard.runtime.length_dependent_rope import length_dependent_rope
from onboard.runtime.limits import PROOF
from onboard.verify.ways import DECODE, interface_for, plans, run_plain, run_plan

_LENGTHS = (11, 17, 33, 48)
_ON_RANKS = 2
"""Prompts on several ranks, the longest: each step takes its time there."""
_MAX_WINDOW = 1024  # longest sliding window that the longest prompt is made to exceed


class Trial:
    """A checkpoint's pipeline and the prompts; the same seed gives the same prompts everywhere."""

    def __init__(
        self, checkpoint: Path, runtime: RuntimeConfig, root: Path, model: str, seed: int
    ) -> None:
        self.said = checkpoint, runtime.model_dump(exclude_unset=True), root, model
        """What another process makes the same of, with the seed."""
        self.context = make_context(checkpoint, runtime, root=root, model=model, defaults=PROOF)
        prompts = make_prompts(self.context, seed)
        self.prompts = prompts if self.context.ranks.is_alone else prompts[-_ON_RANKS:]
        self.context.runtime = _roomy(self.context.runtime, self.prompts)
        self._rope = length_dependent_rope(self.context.factory.text_config.to_dict())

    def run(
        self, observe: Observer, transforms: Sequence[BaseTransform[Any]] | None = None
    ) -> None:
        """Run the pipeline, or other `transforms`."""
        Pipeline(pipeline_for(self.context) if transforms is None else transforms).run(
            self.context, observe
        )

    def is_as_before(self) -> bool:
        """Whether the last transform found nothing to do on any rank: on several ranks each step
        takes its time, and all of them agree on what they compute.
        """
        ranks = self.context.ranks
        return not ranks.is_alone and bool(least(not matched(self.context.history[-1]), ranks))

    def logits(self, module: nn.Module) -> dict[str, list[torch.Tensor]]:
        """Return each prompt's logits [tokens, vocabulary] by each way of running that the model
        has at this point of the pipeline.
        """
        if self.context.cache is None or not self.context.cache.resources:
            return {"prefill": run_plain(module, self.prompts, self.context)}
        cache = interface_for(self.context.cache, self.prompts)
        ways = plans(self.prompts, self._rope)
        if uncached_mixers(module):  # between the transforms that cache one kind of mixer each
            ways = {"prefill": ways["prefill"]}
        return {
            way: run_plan(module, cache, self.prompts, plan, self._rope)
            for way, plan in ways.items()
        }


def follow_trial(
    connection: Connection,
    checkpoint: Path,
    values: Mapping[str, Any],
    root: Path,
    model: str,
    seed: int,
) -> None:
    """Do on a rank what the first one's trial does, which compares."""
    trial = Trial(checkpoint, RuntimeConfig.model_validate(values), root, model, seed)

    def compute(_: str, module: nn.Module, __: TransformContext) -> None:
        if not trial.is_as_before():
            trial.logits(module)

    trial.run(compute)


def matched(entry: HistoryEntry) -> bool:
    """Whether a transform found something to do."""
    return not entry.skipped and bool(entry.num_matches or entry.summary)


def make_prompts(context: TransformContext, seed: int) -> list[list[int]]:
    """Return random prompts: ragged, at most a batch, one of them longer than a sliding window of
    usual size.
    """
    config, runtime = context.factory.text_config, context.runtime
    lengths = [min(length, runtime.max_seq_len) for length in _LENGTHS[-runtime.max_batch_size :]]
    window = getattr(config, "sliding_window", None)
    if window and window <= _MAX_WINDOW:
        lengths[-1] = min(max(lengths[-1], window + 2 * DECODE), runtime.max_seq_len)
    draw = random.Random(seed)
    words = text_tokens(context.factory.config, context.codebooks)
    return [draw.choices(words, k=length) for length in lengths]


def _roomy(runtime: SettledConfig, prompts: Sequence[Sequence[int]]) -> SettledConfig:
    """Return the configuration with room for all prompts at once, in a step and in the cache."""
    tokens = max(runtime.max_num_tokens, sum(map(len, prompts)))
    cache = runtime.kv_cache_config.model_copy(update={"max_tokens": None})
    return runtime.model_copy(update={"max_num_tokens": tokens, "kv_cache_config": cache})
