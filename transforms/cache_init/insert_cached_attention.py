"""Swap every canonical attention for a back end's attention over the paged cache."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from onboard.graph.context import TransformContext
from onboard.graph.descriptor import AttentionDescriptor, CachedOpDescriptor, source_nodes
from onboard.graph.fx import add_placeholder, arguments, replace_with
from onboard.graph.interface import cache_dtype, make_interface
from onboard.graph.sequence import CachedSequenceInterface
from onboard.graph.transform import BaseTransform, TransformConfig, TransformInfo, register_transform


class InsertCachedAttentionConfig(TransformConfig):
    """Fields of `insert_cached_attention`."""

    backend: str | None = None
    """The attention back end; None: that of the run."""


@register_transform("insert_cached_attention")
class InsertCachedAttention(BaseTransform[InsertCachedAttentionConfig]):
    """From here on the graph takes one flat row of tokens, the sequence metadata and the caches."""

    config_class = InsertCachedAttentionConfig

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Replace the nodes and register their caches with `context.cache`."""
        assert isinstance(gm, fx.GraphModule)
        descriptor = AttentionDescriptor()
        nodes = source_nodes(gm, descriptor)
        for node in nodes:
            descriptor.check(node)
        if context.cache is None:
            context.cache = make_interface(context)
        target = descriptor.cached_op(self.config.backend or context.attn_backend)
        for node in nodes:
            _swap(gm, descriptor.prepare(gm, node), descriptor, target, context)
        return gm, TransformInfo(skipped=not nodes, num_matches=len(nodes))


def _swap(
    gm: fx.GraphModule, node: fx.Node, descriptor: CachedOpDescriptor, target: Any, context: TransformContext
) -> None:
    cache = context.cache
    assert isinstance(cache, CachedSequenceInterface)
    metadata = [add_placeholder(gm, name, cache.info.args[name]) for name in descriptor.metadata]
    caches = []
    for name, resource in descriptor.resources(node, cache.info.page_size, cache_dtype(context)).items():
        unique = f"{name}_{sum(each.startswith(name) for each in cache.resources)}"
        cache.add_cache(unique, resource)
        caches.append(add_placeholder(gm, unique, resource.allocate(2, context.device)))
    tensors = list(arguments(node).values())[: descriptor.num_tensors]
    with gm.graph.inserting_before(node):
        cached = gm.graph.call_function(target, (*tensors, *metadata, *caches, *descriptor.constants(node)))
    cached.meta.update(node.meta)
    replace_with(node, cached)
