"""The graph of a model file's small model, and how several ranks divide it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.export import Dim
from torch.fx import GraphModule, Node

from onboard import modeling
from onboard.analysis.tiny.tiny_model import made_with
from onboard.analysis.tiny.tiny_prompts import prompt, vocabulary
from onboard.codegen.hints.marked_sites import MARK, mark
from onboard.errors import OnboardError
from onboard.graph.export.to_graph import export_to_graph
from onboard.graph.shapes import propagate_shapes
from onboard.graph.sharding.cuts import Layout
from onboard.graph.sharding.detect import detect
from onboard.graph.sharding.distribution import Distribution
from onboard.graph.sharding.hints import KEY, Hint
from onboard.graph.sharding.rewriting import Rewriting

_NAME = "onboard_marked_model_file"
WORLD_SIZES = (2, 3, 4, 6, 8)
"""Among how many ranks small models are divided, as far as their heads allow it."""
_NEAR = 64
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Division:
    """What each node of a graph is on several ranks."""

    gm: GraphModule
    hints: dict[int, dict[Node, Hint]]
    """By the number of ranks: the smallest first."""
    layouts: dict[Node, list[Layout]]
    """Of each of a node's results, on the fewest ranks."""
    summed: dict[Node, str]
    """Node whose value is a sum over ranks that is made there -> the kind of layer."""

    @property
    def fewest(self) -> dict[Node, Hint]:
        """The hints for the fewest ranks."""
        return next(iter(self.hints.values()))

    def kind(self, node: Node) -> str:
        """Return the kind of layer that a node belongs to: its hint's, or that of what it is made
        of.
        """
        pending, seen = [node], set[Node]()
        while pending and len(seen) < _NEAR:
            each = pending.pop(0)
            if (hint := self.fewest.get(each)) is not None:
                return hint.layer_type
            seen.add(each)
            pending += [one for one in each.all_input_nodes if one not in seen]
        return "unknown"


def small_model(text: str, reference: nn.Module) -> nn.Module:
    """Return the model that a file's text defines, in the config of transformers' small one."""
    module = ModuleType(_NAME)
    module.__dict__[MARK] = mark
    with _registering(module) as models:
        exec(compile(text, f"<{_NAME}>", "exec", dont_inherit=True), module.__dict__)
        [model_class] = models.values()
        return model_class(_config(reference)).eval().requires_grad_(False)


@contextmanager
def _registering(module: ModuleType) -> Iterator[dict[str, type[nn.Module]]]:
    models: dict[str, type[nn.Module]] = {}
    with (
        mock.patch.dict(sys.modules, {_NAME: module}),
        mock.patch.object(modeling, "_MODELS", models),
        mock.patch.dict(modeling._CONFIGS),
    ):
        yield models


def _config(reference: nn.Module) -> Any:
    """Return the config of transformers' small model, or what the file's own config class makes of
    it.
    """
    config: Any = reference.config
    plain = modeling.registered_config(config.model_type)
    return config if plain is None else plain.from_dict(made_with(reference).to_dict())


def graph_of(model: nn.Module, reference: nn.Module) -> GraphModule:
    """Return the graph of a small model, for batches and lengths of any size."""
    inputs = prompt(2, length=11, batch=3, tokens=vocabulary(reference))
    dims = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    return export_to_graph(model, inputs, dict.fromkeys(inputs, dims), _CPU)


def divided(gm: GraphModule) -> Division:
    """Return how ranks divide a graph.

    Raises:
        OnboardError: no number of ranks divides its heads, or it has nothing to divide.
    """
    propagate_shapes(gm, _CPU)
    found = {size: detect(gm, Distribution(size)) for size in WORLD_SIZES}
    fits = {
        size: hints
        for size, hints in found.items()
        if hints and not any("heads" in hint.refused for hint in hints.values())
    }
    if not fits:
        refused = {hint.refused: None for each in found.values() for hint in each.values()}
        what = ", ".join(filter(None, refused)) or "any layer"
        raise OnboardError(f"no number of ranks from 2 to {max(WORLD_SIZES)} divides {what}")
    return Division(gm, fits, *rewritten(gm, next(iter(fits.values()))))


def rewritten(
    gm: GraphModule, hints: dict[Node, Hint]
) -> tuple[dict[Node, list[Layout]], dict[Node, str]]:
    """Return what becomes of each node on a rank: its layouts, and which of them are summed."""
    graph, twins = fx.Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(gm.graph, val_map=twins))
    for node, twin in twins.items():
        twin.meta = {**node.meta, **({KEY: hints[node]} if node in hints else {})}
    rewriting = Rewriting(GraphModule(gm, graph), 0, lambda hint: True)
    rewriting.run()
    origins = {twin: node for node, twin in twins.items()}
    layouts = {origins[twin]: list(found) for twin, found in rewriting.layouts.items()}
    return layouts, {origins[twin]: kind for twin, kind in rewriting.summed.items()}
