"""How many experts of each layer a step's tokens really went to."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from onboard.bench.work import experts_of, is_mixture
from onboard.cache.cached_sequence import input_names
from onboard.graph.fx import arguments, graph_modules
from onboard.runtime.engine import Engine


class _Hits(fx.Interpreter):
    """Runs a graph and counts the experts that each layer's tokens chose."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.counts: list[int] = []

    def run_node(self, n: fx.Node) -> Any:
        """Count before a mixture's node runs."""
        if is_mixture(n):
            chosen = self.env[arguments(n)["selected_experts"]].unique()
            own = (chosen >= 0) & (chosen < experts_of(self.module, n).count)
            self.counts.append(int(own.sum()))
        return super().run_node(n)


def has_mixtures(engine: Engine) -> bool:
    """Whether some of the model's layers have experts."""
    return any(is_mixture(node) for _, gm in graph_modules(engine.gm) for node in gm.graph.nodes)


class _Counting(nn.Module):
    """A graph that counts its experts' tokens while it runs."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__()
        self.graph = gm.graph
        self.hits = _Hits(gm)

    def forward(self, **inputs: torch.Tensor) -> Any:
        """Run the graph with the inputs that it names."""
        return self.hits.run(*(inputs[name] for name in input_names(self)))


@torch.inference_mode()
def experts_hit(engine: Engine) -> list[float]:
    """Run the engine's last step once more, without CUDA graphs; return the distinct experts of
    each mixture in order, on several ranks those that the first one has.

    The requests of that step must not go on: recurrent states are advanced once more. Tokens are
    chosen again, too: other ranks replay what they have captured, at whose end they wait for them.
    """
    counts: list[float] = []
    if not has_mixtures(engine):
        return counts
    with engine.together():
        for _, gm in graph_modules(engine.gm):
            counting = _Counting(gm)
            engine.cache.next_tokens(counting)
            counts += counting.hits.counts
    return counts
