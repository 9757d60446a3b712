"""What a rank does that another one leads: builds the model with its share of the weights, and runs
the steps that it is told.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from onboard.cache.orders import obey
from onboard.config import RuntimeConfig
from onboard.gpu import gib
from onboard.runtime.build import build_engine
from onboard.runtime.engine import Engine


@dataclass(frozen=True)
class Ready:
    """What a rank has made of a model."""

    rank: int
    limits: dict[str, int]
    """What has to be the same on all ranks."""
    weight_bytes: int
    """Of the weights that it keeps."""
    bytes_read: int
    """Of the checkpoint's files; 0 where weights are random."""
    cache_bytes: int
    facts: tuple[str, ...]

    def __str__(self) -> str:
        weights, read, caches = map(gib, (self.weight_bytes, self.bytes_read, self.cache_bytes))
        return f"rank {self.rank}: {weights} of weights, {read} read, {caches} of caches"


def follow(
    connection: Connection,
    checkpoint: Path,
    values: Mapping[str, Any],
    root: Path | None,
    model: str,
    strict: bool,
) -> None:
    """Build the model of a configuration, say what came of it, and obey until told to give it up."""
    runtime = RuntimeConfig.model_validate(values)
    engine = build_engine(checkpoint, runtime, root=root, model=model, strict=strict)
    connection.send(("said", ready(engine)))
    with torch.inference_mode():
        while obey(connection.recv_bytes(), engine.cache, engine.gm):
            pass
    del engine
    gc.collect()
    torch.cuda.empty_cache()  # nothing without a GPU


def ready(engine: Engine) -> Ready:
    """Return what this process has made of a model."""
    cache, weights = engine.cache, {id(each): each.nbytes for each in engine.gm.parameters()}
    same = {
        **engine.limits,
        "pages": cache.num_pages,
        "captured sizes": sum(cache.info.decode_sizes),
    }
    return Ready(
        cache.ranks.rank,
        same,
        sum(weights.values()),
        engine.bytes_read,
        sum(each.nbytes for each in cache.caches.values()),
        tuple(engine.facts),
    )
