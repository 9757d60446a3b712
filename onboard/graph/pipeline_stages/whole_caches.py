"""The caches of a whole model, which each of its pipeline stages has a part of.

One schedule serves all stages: pages are numbered, and states are kept, as the whole model needs
it, also by a rank whose layers have no caches of some kind.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from onboard.cache.resources import CacheResource
from onboard.graph.assembly.assemble import pipeline_for
from onboard.graph.cache_init.insert_cached import InsertCached
from onboard.graph.context import TransformContext
from onboard.graph.fx import copy_graphs


def whole_caches(gm: fx.GraphModule, context: TransformContext) -> tuple[CacheResource, ...]:
    """Return the caches that the run's transforms would register for a graph, which stays as it
    is.
    """
    twin = copy_graphs(gm)
    trial = replace(context, facts=[], cache=None)
    for transform in pipeline_for(context):
        if isinstance(transform, InsertCached) and transform.config.enabled:
            transform.apply(twin, trial)
    return () if trial.cache is None else tuple(trial.cache.resources.values())
