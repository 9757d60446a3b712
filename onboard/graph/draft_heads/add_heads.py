"""Puts heads for multi-token prediction beside a model's graph: each a graph of its own, over the
same pages, with the model's embedding and output layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.cache.cached_sequence import CachedSequenceInterface
from onboard.cache.captured_steps import CapturedSteps
from onboard.config import SpeculativeConfig
from onboard.graph.assembly.assemble import pipeline_for
from onboard.graph.context import TransformContext
from onboard.graph.draft_heads.head_model import HIDDEN, HeadFactory, ModelParts
from onboard.graph.draft_heads.head_tensors import HeadTensors, find_heads, heads_of_config
from onboard.graph.fx import add_placeholder, arguments, nodes_of, placeholders, replace_with
from onboard.graph.pipeline import Pipeline
from onboard.graph.weight_load.quantised_folder import open_checkpoint
from onboard.graph.weight_load.weight_names import match_names

CAPTURE = "detect_head_input_for_capture"
_CHANGES: dict[str, dict[str, Any]] = {
    # What lies under two names is exported as it is, not copied from a layer or expert like it.
    "export_to_gm": {"stamp_layers": False},
    CAPTURE: {"enabled": True},
    "detect_hidden_states_for_capture": {"enabled": False},
    "initialize_cache": {"enabled": False},
    "resize_kv_cache": {"enabled": False},
    "compile_model": {"enabled": False},
    "call_ops_directly": {"enabled": False},
}


@dataclass(frozen=True)
class HeadGraph:
    """A head's cached graph, whose inputs are those of the model's graph.

    A row of it stands where a token's hidden state lies, and reads that and the embedding of a later
    token: the next one, of the first head, and one further for each head after it.
    """

    gm: nn.Module
    reads: str
    """The cache with the hidden states that it begins with."""
    keeps: str
    """The cache with those that come out of it, before the output layer."""
    captured: CapturedSteps | None = None
    """Its captured steps of several tokens of a request: others are padded to them."""


def add_heads(gm: fx.GraphModule, context: TransformContext) -> list[HeadGraph]:
    """Return the checkpoint's heads as graphs with weights, their caches registered beside those of
    the model's cached graph, which keeps its head's input.

    Raises `UsageError` where the checkpoint has no heads that can be run.
    """
    model = context.factory.build_model()
    parts = ModelParts(model)
    size = int(parts.norm.get_parameter("weight").shape[0])
    graphs: list[HeadGraph] = []
    reads = _kept_by(gm)
    shared = dict(gm.named_parameters(remove_duplicate=False))
    for head in _heads(model, parts, size, context):
        own = _context(context, HeadFactory(context.factory, head, size), shared)
        graph = Pipeline(pipeline_for(own, _CHANGES)).run(own)
        assert isinstance(graph, fx.GraphModule)
        _read_kept(graph, reads, context.cache)
        graphs.append(HeadGraph(graph, reads, _kept_by(graph)))
        context.bytes_read += own.bytes_read
        context.facts.extend(fact for fact in own.facts if fact not in context.facts)
        context.facts.append(_fact(head, parts.path))
        reads = graphs[-1].keeps
    return graphs


def _heads(
    model: nn.Module, parts: ModelParts, size: int, context: TransformContext
) -> list[HeadTensors]:
    """Return the checkpoint's heads, or those that its config names where weights are random."""
    layers = list(parts.layers)
    if context.runtime.skip_loading_weights:
        config = context.factory.text_config.to_dict()
        return heads_of_config(config, parts.path, layers)
    available = open_checkpoint(context.factory.checkpoint).names()
    used = match_names(model.state_dict().keys(), available).values()
    return find_heads(layers, size, used, available)


def draft_length(wanted: int, heads: int) -> int:
    """Return how many tokens a draft has: one of each of several heads, and as many as `wanted` where
    a single one goes on, or no head drafts.
    """
    return min(wanted, heads) if heads > 1 else wanted


def _context(
    context: TransformContext, factory: HeadFactory, shared: dict[str, nn.Parameter]
) -> TransformContext:
    """Return the context of a head's pipeline, which adds to the caches of the model's."""
    runtime = context.runtime.model_copy(update={"speculative": SpeculativeConfig()})
    fresh: dict[str, Any] = {"history": [], "facts": [], "attention": [], "bytes_read": 0}
    return replace(
        context, factory=factory, runtime=runtime, chosen=frozenset(), shared=shared, **fresh
    )


def _kept_by(gm: fx.GraphModule) -> str:
    """Return the cache in which a graph keeps its head's input."""
    [node] = nodes_of(gm, torch.ops.onboard.torch_cached_head_input)
    return str(arguments(node)["hidden_cache"].target)


def _read_kept(gm: fx.GraphModule, name: str, cache: CachedSequenceInterface) -> None:
    """Let a head's graph read its hidden states from a cache, in the place of an input."""
    [given] = [node for node in placeholders(gm) if node.target == HIDDEN]
    resource = cache.resources[name]
    [slots] = cache.metadata_names(["slot_mapping"], resource)
    inputs = [
        add_placeholder(gm, slots, cache.info.args[slots]),
        add_placeholder(gm, name, resource.allocate(2, cache.info.device)),
    ]
    with gm.graph.inserting_after(placeholders(gm)[-1]):
        read = gm.graph.call_function(
            torch.ops.onboard.torch_kept_head_input.default, tuple(inputs)
        )
    replace_with(given, read)
    gm.graph.lint()
    gm.recompile()


def _fact(head: HeadTensors, layers: str) -> str:
    return (
        f"drafts: the head of {head.projection} has a layer like {layers}.{head.layer}, and the model's embedding and "
        "output layer"
    )
