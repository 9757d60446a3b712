"""Which pipeline stage computes what of a graph: its layers in order, as evenly as their number
allows.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx, nn

from onboard.errors import UsageError
from onboard.graph.fx import attribute

OF_LIST = re.compile(r"(.*?)\.(\d+)(?:\.|$)")
"""A dotted path: the outermost list on it, and the place in that."""


@dataclass(frozen=True)
class StagedGraph:
    """The nodes of a graph and the stages that compute them."""

    layers: tuple[range, ...]
    """Of each stage."""
    stages: Mapping[fx.Node, int | None]
    """None: of the inputs or of weights alone, so every stage that needs it computes it."""

    def crossing(self, stage: int) -> list[fx.Node]:
        """Return what a stage, and those behind it, read of those before it."""
        before = (node for node, own in self.stages.items() if own is not None and own < stage)
        return [
            node
            for node in before
            if any(
                (reader := self.stages[user]) is not None and reader >= stage for user in node.users
            )
        ]


def staged(gm: fx.GraphModule, count: int) -> StagedGraph:
    """Return which of `count` stages computes each node.

    A layer's nodes are told by the paths of their modules; what is between layers is computed as
    soon as what it reads is there. Raises `UsageError` for fewer layers than stages.
    """
    of_layer, total = _layers(gm)
    if total < count:
        raise UsageError(
            f"dist_mapping has pp {count} and the model has {total} layers that follow one another",
            hint=f"Set it to {total} or less" if total > 1 else "Set it to 1",
        )
    bounds = [total * stage // count for stage in range(count + 1)]
    layers = tuple(range(*pair) for pair in zip(bounds, bounds[1:], strict=False))
    stage_of = {layer: stage for stage, own in enumerate(layers) for layer in own}
    stages: dict[fx.Node, int | None] = {}
    free = _computed_anywhere(gm)
    for node in gm.graph.nodes:
        if node.op == "output":
            stages[node] = count - 1
        elif node in free:
            stages[node] = None
        else:
            own = stage_of[of_layer[node]] if node in of_layer and not _is_item(node) else 0
            stages[node] = max([own, *(stages[each] or 0 for each in node.all_input_nodes)])
    return StagedGraph(layers, stages)


def _is_item(node: fx.Node) -> bool:
    """Whether a node takes one of several results, which are never sent all together."""
    return node.target is operator.getitem


def _layers(gm: fx.GraphModule) -> tuple[dict[fx.Node, int], int]:
    """Return the layer of each node that has one, and the number of layers: those of the list on
    whose members most nodes are.
    """
    found: dict[str, dict[fx.Node, int]] = defaultdict(dict)
    for node in gm.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        paths = (str(path) for path, _ in stack.values())
        if (match := next(filter(None, map(OF_LIST.match, paths)), None)) is not None:
            found[match[1]][node] = int(match[2])
    largest = max(found.values(), key=len, default={})
    return largest, max(largest.values(), default=-1) + 1


def _computed_anywhere(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that depend on the inputs alone, or on weights alone."""
    reads: dict[fx.Node, set[str]] = {}
    for node in gm.graph.nodes:
        own = set().union(*(reads[each] for each in node.all_input_nodes))
        if node.op == "placeholder":
            own = {"inputs"}
        elif node.op == "get_attr" and isinstance(attribute(gm, str(node.target)), nn.Parameter):
            own = {"weights"}
        reads[node] = own
    return {node for node, own in reads.items() if len(own) < 2 and node.op != "output"}
