"""What swaps a canonical mechanism for a cached one: one descriptor a mechanism.

A descriptor names the source operator and the caches that a node needs; which operators take the
source's place is declared where these are registered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload

import onboard.ops  # noqa: F401  registers the operators
from onboard.cache.batch import METADATA_NAMES, STATE_METADATA_NAMES
from onboard.cache.resources import CacheResource, KVPagedResource, StateResource
from onboard.config import suggest
from onboard.errors import NoCachedFormError, OnboardError, UsageError
from onboard.graph.backends import kernel_obstacle
from onboard.graph.fx import arguments, is_op, replace_with
from onboard.ops.library import cached_forms, op_sources

_METADATA = {*METADATA_NAMES, *STATE_METADATA_NAMES}


class CachedOpDescriptor(ABC):
    """One mechanism that keeps state from step to step.

    Which arguments a cached operator has (tensors, metadata, caches, constants, in this order) is
    read off its schema.
    """

    source: Any
    """The canonical operator (a packet of `torch.ops.onboard`)."""
    has_second_table: ClassVar[bool] = False
    """The last cache may see farther back than the first: where its pages lie follows, a block
    table and slots.
    """

    @property
    def cached_names(self) -> Mapping[str, str]:
        """Back end -> name of the cached operator in `torch.ops.onboard`, of those that ship."""
        names = cached_forms(self.source.__name__)
        return {backend: name for backend, name in names.items() if op_sources()[name].ships}

    @property
    def num_tensors(self) -> int:
        """Leading tensor arguments that the source and the cached operator share."""
        return self._arguments.index(self.metadata[0])

    @property
    def metadata(self) -> tuple[str, ...]:
        """Names of the `SequenceInfo` inputs that follow them."""
        return tuple(name for name in self._arguments if name in _METADATA)

    @property
    def caches(self) -> tuple[str, ...]:
        """Names of the caches that come next, which the cached operator writes to."""
        return op_sources()[self.cached_names["torch"]].mutates

    @property
    def _arguments(self) -> list[str]:
        schema = getattr(torch.ops.onboard, self.cached_names["torch"]).default._schema
        return [argument.name for argument in schema.arguments]

    def cached_op(self, backend: str) -> OpOverload:
        """Return a back end's cached operator."""
        name = self._cached_name(backend)
        if name is None:
            raise UsageError(
                f"there is no attention back end {backend!r}",
                hint=suggest(backend, self.cached_names),
            )
        overload: OpOverload = getattr(torch.ops.onboard, name).default
        return overload

    def _cached_name(self, backend: str) -> str | None:
        return self.cached_names.get(backend) or self.extension_name(backend)

    def extension_name(self, backend: str) -> str | None:
        """Return the name of the operator that an extension has registered for a back end, None
        when there is none.

        It is that of torch's operator with the back end's name in place of "torch".
        """
        name = backend + self.cached_names["torch"].removeprefix("torch")
        source = op_sources().get(name)
        return None if source is None or source.ships else name

    def obstacle(self, backend: str, node: fx.Node) -> str:
        """Return why a back end cannot serve a node, "" when it can; an extension's has to know by
        itself.
        """
        if self._cached_name(backend) is None:
            return "this mechanism has no such operator"
        return (
            self.kernel_obstacle(node)
            if backend != "torch" and backend in self.cached_names
            else ""
        )

    def kernel_obstacle(self, node: fx.Node) -> str:
        """Return why kernels cannot serve a node, by its shapes and dtypes and the GPU; "" when
        they can.
        """
        return ""

    def check(self, node: fx.Node) -> None:  # noqa: B027  (most mechanisms can do everything)
        """Raise `OnboardError` when the node asks for something that its cached form cannot do."""

    def note(self, node: fx.Node) -> str:
        """Return what a user of the run has to know of a node, "" for nothing: it becomes a
        fact.
        """
        return ""

    def prepare(self, gm: fx.GraphModule, node: fx.Node) -> fx.Node:
        """Bring a source node into the form that the cached operator takes; return the node that
        now stands for it.
        """
        return node

    @abstractmethod
    def resources(
        self, node: fx.Node, page_size: int, dtype: torch.dtype | None
    ) -> dict[str, CacheResource]:
        """Return the caches that the node needs, by the name of the argument; `dtype` None: that of
        the tensors.
        """

    def narrowed(self, resources: dict[str, CacheResource], dtype: Any) -> dict[str, CacheResource]:
        """Return the caches, a state in `dtype`, torch's or a sketch's, if the mechanism can keep it
        so.
        """
        return resources

    def constants(self, node: fx.Node) -> tuple[Any, ...]:
        """Return the arguments that follow the caches, as the source has them."""
        found, names = arguments(node), self._arguments
        return tuple(found[name] for name in names[names.index(self.caches[-1]) + 1 :])


class KeptTokens(NamedTuple):
    """What attention keeps of each token, of keys or of values."""

    heads: int
    dim: int
    dtype: torch.dtype


class AttentionDescriptor(CachedOpDescriptor):
    """Softmax attention with a paged cache of keys and values."""

    source = torch.ops.onboard.torch_attention

    def check(self, node: fx.Node) -> None:
        """Refuse masks, attention to later tokens, dropout and sinks of queries: the kernels know
        positions only.
        """
        refuse_unless(node, attn_mask=None, is_causal=True, dropout_p=0.0)
        sinks = arguments(node)["sinks"]
        if isinstance(sinks, fx.Node) and sinks.meta["val"].dim() != 1:
            refuse_unless(node, sinks=None)
        heads = 1 if arguments(node)["layout"] == "bnsd" else 2
        if any(
            _in_one_row(tensor_argument(node, index), heads) is None
            for index in range(self.num_tensors)
        ):
            raise OnboardError(
                f"{node.name} ({module_path(node)}) has a number of heads that varies and cannot be cached",
                hint="Only its prefill is supported",
            )

    def prepare(self, gm: fx.GraphModule, node: fx.Node) -> fx.Node:
        """Turn a bnsd node into a bsnd one between transposes."""
        found = arguments(node)
        if found["layout"] == "bsnd":
            return node
        with gm.graph.inserting_before(node):
            tensors = [
                _transpose(gm, tensor) for tensor in list(found.values())[: self.num_tensors]
            ]
            options = {**dict(list(found.items())[self.num_tensors :]), "layout": "bsnd"}
            bsnd = gm.graph.call_function(self.source.default, tuple(tensors), options)
            bsnd.meta.update(node.meta)
            bsnd.meta["val"] = node.meta["val"].transpose(1, 2)
            output = _transpose(gm, bsnd)
        replace_with(node, output)
        return bsnd

    def resources(
        self, node: fx.Node, page_size: int, dtype: torch.dtype | None
    ) -> dict[str, CacheResource]:
        """Return a cache for the keys and one for the values, of the shapes that the tensors
        have.
        """
        found = arguments(node)
        bounds = [
            found[name] for name in ("sliding_window", "chunk_size") if found[name] is not None
        ]
        window = min(bounds, default=None)
        caches = [
            KVPagedResource(each.heads, each.dim, dtype or each.dtype, page_size, window)
            for each in self.kept(node)
        ]
        return dict(zip(("k_cache", "v_cache"), caches, strict=True))

    def kept(self, node: fx.Node) -> tuple[KeptTokens, KeptTokens]:
        """Return what is kept of keys and of values."""
        return _kept(tensor_argument(node, 1)), _kept(tensor_argument(node, 2))


def _kept(tensor: fx.Node) -> KeptTokens:
    val, heads = tensor.meta["val"], _in_one_row(tensor, 2)
    assert heads is not None
    return KeptTokens(heads, int(val.shape[3]), val.dtype)


class StateDescriptor(CachedOpDescriptor):
    """A recurrence: what it keeps of each sequence is declared where its cached operator is
    registered.
    """

    def __init__(self, op: str) -> None:
        self.source = getattr(torch.ops.onboard, op)

    def kernel_obstacle(self, node: fx.Node) -> str:
        """Return why kernels cannot serve the dtype of the first tensor, or this GPU; "" when they
        can.
        """
        return kernel_obstacle(tensor_argument(node, 0).meta["val"].dtype)

    def resources(
        self, node: fx.Node, page_size: int, dtype: torch.dtype | None
    ) -> dict[str, CacheResource]:
        """Return one cache, of the shape and dtype that the op declares whatever `dtype` is."""
        state = op_sources()[self.cached_names["torch"]].state
        assert state is not None, f"{self.cached_names['torch']} does not declare its state"
        shape, own_dtype = state(**{name: _value(value) for name, value in arguments(node).items()})
        return {self.caches[0]: StateResource(tuple(map(int, shape)), own_dtype)}


class NarrowStateDescriptor(StateDescriptor):
    """A recurrence whose states may lie in the cache in fewer bits than it computes with."""

    def narrowed(self, resources: dict[str, CacheResource], dtype: Any) -> dict[str, CacheResource]:
        """Return the caches with the state in `dtype`; None: in its own."""
        if dtype is None:
            return resources
        return {**resources, self.caches[0]: replace(resources[self.caches[0]], dtype=dtype)}


def _value(argument: Any) -> Any:
    """Return a node's value, a tensor without data; any other argument as it is."""
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def refuse_unless(node: fx.Node, **needed: Any) -> None:
    """Raise `NoCachedFormError` when an argument of a source node has another value than its cached form
    needs.
    """
    found = arguments(node)
    for name, value in needed.items():
        if found[name] != value:
            raise NoCachedFormError(
                f"{node.name} ({module_path(node)}) has {name}={found[name]!r} and cannot be cached, "
                "so the model cannot generate yet",
                hint=f"Its model file is complete; its cached form needs {name}={value!r}",
            )


def _in_one_row(tensor: fx.Node, dim: int) -> int | None:
    """Return a dimension's size in the cached graph, whose batch is one row of tokens; None: it is
    not known.

    Heads that are folded into the batch, as for `torch.bmm`, are batch times heads: in one row, the
        heads.
    """
    size = tensor.meta["val"].shape[dim]
    if isinstance(size, int):
        return size
    inputs = tensor.graph.find_nodes(op="placeholder", sort=True)
    batch = next(node for node in inputs if node.target == "input_ids").meta["val"].shape[0]
    expression = (
        size.node.expr if isinstance(batch, int) else size.node.expr.subs(batch.node.expr, 1)
    )
    return int(expression) if expression.is_number else None


def module_path(node: fx.Node) -> str:
    """Return the path of the innermost module that a node comes from, for messages."""
    stack = node.meta.get("nn_module_stack") or {}
    path: str = list(stack.values())[-1][0] if stack else ""
    return path or "unknown module"


def source_nodes(gm: fx.GraphModule, descriptor: CachedOpDescriptor) -> list[fx.Node]:
    """Return the nodes of a mechanism, in graph order."""
    return [node for node in gm.graph.nodes if is_op(node, descriptor.source)]


def tensor_argument(node: fx.Node, position: int) -> fx.Node:
    """Return a node's argument by its position in the operator's schema, which is a tensor."""
    tensor = list(arguments(node).values())[position]
    assert isinstance(tensor, fx.Node)
    return tensor


def _transpose(gm: fx.GraphModule, node: fx.Node) -> fx.Node:
    swapped = gm.graph.call_function(torch.ops.aten.transpose.int, (node, 1, 2))
    swapped.meta["val"] = node.meta["val"].transpose(1, 2)
    return swapped
