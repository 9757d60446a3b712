"""Swapping the nodes of one mechanism for a back end's cached operator."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import fx

from onboard.cache.cached_sequence import CachedSequenceInterface
from onboard.cache.step_buffer import table_names
from onboard.graph.backends import cached_backend
from onboard.graph.cache_init.descriptor import CachedOpDescriptor, source_nodes
from onboard.graph.cache_init.interface import cache_dtype, make_interface, state_dtype
from onboard.graph.context import TransformContext
from onboard.graph.fx import add_placeholder, arguments, replace_with
from onboard.graph.transform import GraphTransform, TransformConfig, TransformInfo, skipped


class InsertCachedConfig(TransformConfig):
    """Fields of every `insert_cached_*`."""

    backend: str | None = None
    """The back end of the mechanism; None: that of the run, or the one that there is."""


class InsertCached(GraphTransform[InsertCachedConfig]):
    """From here on the graph takes one flat row of tokens, the sequence metadata and the caches."""

    config_class = InsertCachedConfig
    descriptor: ClassVar[CachedOpDescriptor]
    """The mechanism."""

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> TransformInfo:
        """Replace the nodes and register their caches with `context.cache`."""
        nodes = source_nodes(gm, self.descriptor)
        for node in nodes:
            self.descriptor.check(node)
        notes = dict.fromkeys(self.descriptor.note(node) for node in nodes)
        context.facts.extend(note for note in notes if note)
        if context.cache is None:
            context.cache = make_interface(context)
        for node in nodes:
            target = self.descriptor.cached_op(self._backend(node, context))
            _swap(gm, self.descriptor.prepare(gm, node), self.descriptor, target, context)
        return (
            TransformInfo(num_matches=len(nodes))
            if nodes
            else skipped("the graph has no such node")
        )

    @classmethod
    def resolve_backend_for_node(cls, requested_backend: str, source_attn_node: fx.Node) -> str:
        """Return the back end that serves a node: the requested one, or "torch" where that one
        cannot.
        """
        return (
            "torch"
            if cls.descriptor.obstacle(requested_backend, source_attn_node)
            else requested_backend
        )

    def from_outside(self) -> str:
        """Name the back end, too, when it is an extension's."""
        backend = self.config.backend
        op = self.descriptor.extension_name(backend) if backend is not None else None
        own = (
            f"{self.key}: its back end {backend} is no part of onboard: the op is {op}"
            if op is not None
            else ""
        )
        return "; ".join(filter(None, (super().from_outside(), own)))

    def _backend(self, node: fx.Node, context: TransformContext) -> str:
        """Return the node's back end; that another takes the place of the one asked for is a
        fact.
        """
        wanted = cached_backend(
            self.config.backend, self.descriptor.cached_names, context, self.key
        )
        if self.config.backend is not None:
            self.descriptor.cached_op(wanted)  # a wish for what there is not is an error
        backend = self.resolve_backend_for_node(wanted, node)
        if backend != wanted:
            fact = f"{self.key}: {backend} is used, not {wanted}: {self.descriptor.obstacle(wanted, node)}"
            context.facts.extend([fact] if fact not in context.facts else [])
        return backend


def _swap(
    gm: fx.GraphModule,
    node: fx.Node,
    descriptor: CachedOpDescriptor,
    target: Any,
    context: TransformContext,
) -> None:
    cache = context.cache
    assert isinstance(cache, CachedSequenceInterface)
    resources = descriptor.narrowed(
        descriptor.resources(node, cache.info.page_size, cache_dtype(context)),
        state_dtype(context),
    )
    names = {
        name: f"{name}_{sum(each.startswith(name) for each in cache.resources)}"
        for name in resources
    }
    for name, resource in resources.items():
        cache.add_cache(names[name], resource)
    inputs = cache.metadata_names(descriptor.metadata, next(iter(resources.values())))
    if descriptor.has_second_table:
        inputs += cache.metadata_names(table_names(0), list(resources.values())[-1])
    metadata = [add_placeholder(gm, name, cache.info.args[name]) for name in inputs]
    caches = [
        add_placeholder(gm, names[name], each.allocate(2, context.device))
        for name, each in resources.items()
    ]
    tensors = list(arguments(node).values())[: descriptor.num_tensors]
    with gm.graph.inserting_before(node):
        cached = gm.graph.call_function(
            target, (*tensors, *metadata, *caches, *descriptor.constants(node))
        )
    cached.meta.update(node.meta)
    replace_with(node, cached)
