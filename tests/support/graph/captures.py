"""A stand-in for CUDA graphs of whole steps: what is replayed is the step again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

_COMPILE = "onboard.graph.compile"


def stand_in_for_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps be captured without a GPU; each takes a second."""
    for each in (f"{_COMPILE}.captured_prompts", f"{_COMPILE}.cuda_graph"):
        monkeypatch.setattr(f"{each}.captured_graph", _captured)
    timed = f"{_COMPILE}.captured_prompts.shortest_time"
    monkeypatch.setattr(timed, lambda step, device: step() and None or 1.0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


def _captured(step: Any, described: str, pool: Any) -> tuple[Any, Any]:
    """Return what a capture returns; a replay writes the step's results to where they were."""
    results = pytree.tree_map(torch.clone, step())

    def replay() -> None:
        new = pytree.tree_leaves(step())
        for target, source in zip(pytree.tree_leaves(results), new, strict=True):
            target.copy_(source)

    return SimpleNamespace(replay=replay), results
