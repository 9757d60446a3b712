"""The graph for embeddings: hidden states come out of it, in the place of logits."""

from __future__ import annotations

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.errors import UsageError
from onboard.graph.fx import copy_graphs, nodes_of


def with_hidden_output(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a cached graph that returns what its language-model head reads.

    That is the last hidden state behind the final norm, [1, rows, hidden]. `gm` is left as it is.
    Raises `UsageError` if the graph has no such head.
    """
    twin = copy_graphs(gm)
    assert isinstance(twin, fx.GraphModule)
    gathers = nodes_of(twin, torch.ops.onboard.gather_logits_before_lm_head)
    if len(gathers) != 1:
        raise UsageError(
            "the graph does not show what its head reads, so there are no embeddings",
            hint="Leave gather_logits_before_lm_head enabled",
        )
    output = twin.graph.output_node()
    output.args = (gathers[0],)
    twin.graph.set_codegen(fx.graph.CodeGen())
    twin.graph.eliminate_dead_code()
    twin.graph.lint()
    twin.recompile()
    return twin
