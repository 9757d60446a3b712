"""A checkpoint's model on several ranks, each with its share of the weights, in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onboard.config import RuntimeConfig
from onboard.graph.assembly.assemble import load_pipeline
from onboard.graph.context import TransformContext
from onboard.graph.fx import copy_graphs
from onboard.graph.pipeline import Pipeline
from onboard.graph.sharding.apply import IndivisibleError
from onboard.graph.transform import BaseTransform, Stages
from onboard.parallel.in_one_process import on_all_ranks
from onboard.parallel.ranks import Ranks
from onboard.runtime.build import make_context

SIZES = range(2, 9)
"""World sizes that are tried."""
_WHOLE = list(Stages)[: list(Stages).index(Stages.SHARDING)]
_OWN = (Stages.SHARDING, Stages.WEIGHT_LOAD)
_OUTPUTS_ALONE = {"detect_sharding": {"simple_shard_only": True}}


@dataclass
class Divided:
    """The ranks' graphs, with their weights."""

    graphs: Sequence[nn.Module]
    contexts: list[TransformContext]
    note: str = ""
    """Why it is divided otherwise than by heads among two ranks."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.graphs)

    def matches(self, key: str) -> list[int]:
        """Return how often a transform matched, by rank."""
        entries = [entry for each in self.contexts for entry in each.history if entry.key == key]
        return [entry.num_matches for entry in entries]

    def logits(self, prompt: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return what each rank has computed for `input_ids` and `position_ids` [batch, seq]."""

        def own(ranks: Ranks) -> torch.Tensor:
            with torch.no_grad():
                found: torch.Tensor = self.graphs[ranks.rank](*prompt.values())
            return found

        return on_all_ranks(self.world_size, own)


def divide(
    checkpoint: Path,
    root: Path,
    world_size: int = 2,
    settings: Mapping[str, Any] | None = None,
    **runtime: Any,
) -> Divided:
    """Return a checkpoint's model on some ranks, in float32; on others where these cannot divide its
    heads, and where no number of them can, the linear layers by their outputs alone.

    `settings` are of transforms, `runtime` of the configuration.
    """
    config = RuntimeConfig(device="cpu", dtype="float32", **runtime)
    context = make_context(checkpoint, config, root=root)
    whole = Pipeline(_of_stages(_WHOLE)).run(context)
    try:
        return _divided(whole, context, world_size, settings)
    except IndivisibleError as error:
        fits = [size for size in error.sizes if size in SIZES]
        if fits:
            return _divided(whole, context, fits[0], settings, note=error.message)
        return _divided(whole, context, world_size, _OUTPUTS_ALONE, note=error.message)


def _divided(
    whole: nn.Module,
    context: TransformContext,
    world_size: int,
    settings: Mapping[str, Any] | None = None,
    note: str = "",
) -> Divided:
    contexts = [
        replace(context, ranks=Ranks(rank, world_size), facts=[], history=[])
        for rank in range(world_size)
    ]
    transforms = _of_stages(_OWN, settings)
    # What is found out of the whole graph is the same for all ranks
    known = [each.key for each in transforms].index("detect_sharding") + 1
    hinted = Pipeline(transforms[:known]).run(contexts[0], start=copy_graphs(whole))
    rest = Pipeline(transforms[known:])
    graphs = [rest.run(own, start=copy_graphs(hinted)) for own in contexts]
    return Divided(graphs, contexts, note)


def _of_stages(
    stages: Sequence[Stages], settings: Mapping[str, Any] | None = None
) -> list[BaseTransform[Any]]:
    return [each for each in load_pipeline(settings or {}) if each.config.stage in stages]


def continued(prompt: Mapping[str, torch.Tensor], tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a prompt [batch, seq] with one more token each [batch], at the next positions."""
    ids, positions = prompt["input_ids"], prompt["position_ids"]
    return {
        "input_ids": torch.cat([ids, tokens[:, None]], dim=1),
        "position_ids": torch.cat([positions, positions[:, -1:] + 1], dim=1),
    }
